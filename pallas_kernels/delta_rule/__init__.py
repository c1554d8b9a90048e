"""The gated delta product of whole sequences."""

from pallas_kernels.delta_rule.api import delta_rule

__all__ = ["delta_rule"]
