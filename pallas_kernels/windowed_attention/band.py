"""The band of distances at which a query sees keys, rows that see none, and the joint softmax of two bands."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from elr_jax.typing import Array, Bool, Float, Int, Keys, Queries, widen

MASKED = -1e30
"""The score of a masked pair."""
FLOOR = -1e29
"""The least value a row's largest score is taken for, so that weights of masked pairs underflow to 0 in every row.

A row that sees no key has this log-sum-exp, and an output of zeros.
"""

LogSumExp = Float[Array, "B T N"]
GlobalKeys = tuple[Keys, Keys, Float[Array, "B K S H"], Float[Array, "B K S H"]]
"""A second key and value of new tokens, and those of cached ones."""


@dataclass(frozen=True)
class Band:
    """Query t sees key s where near ≤ t − s < far (None: no bound)."""

    near: int
    far: int | None

    def holds(self, behind: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether the band holds the distances t − s."""
        inside = behind >= self.near
        return inside if self.far is None else inside & (behind < self.far)


def joined(one: tuple[Queries, LogSumExp], other: tuple[Queries, LogSumExp]) -> tuple[Queries, LogSumExp]:
    """The attention over two disjoint sets of keys from that over each: (Σ e^lse · out) / Σ e^lse."""
    (out, lse), (out_other, lse_other) = one, other
    share = jax.nn.sigmoid(lse_other - lse)[..., None]
    wide = widen(out)
    return (wide + share * (widen(out_other) - wide)).astype(out.dtype), jnp.logaddexp(lse, lse_other)
