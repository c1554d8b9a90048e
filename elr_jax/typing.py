"""The dimension letters of the whole project, and the array types spelled with them.

B batch · T query length · S key length · D model · N query heads · K key-value heads · H head dim · F feed-forward ·
V vocabulary · R rounds (loops) · W window · P Householder steps · C condition · E experts.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, Key, PRNGKeyArray

Tokens = Int[Array, "B T"]
SegmentIds = Int[Array, "B T"]
Positions = Int[Array, "B T"]
Hidden = Float[Array, "B T D"]
Logits = Float[Array, "B T V"]
Depth = Int32[Array, "B"]
Queries = Float[Array, "B T N H"]
Keys = Float[Array, "B S K H"]
Scalar = Float[Array, ""]
Conditions = Float[Array, "B R+1 C"]


def widen(x: Array) -> Array:
    """The array in the type that sums, norms, gates and losses are computed in: float32, or float64 if it is that."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


__all__ = [
    "Array",
    "Bool",
    "Conditions",
    "Depth",
    "Float",
    "Hidden",
    "Int",
    "Int32",
    "Key",
    "Keys",
    "Logits",
    "PRNGKeyArray",
    "Positions",
    "Queries",
    "Scalar",
    "SegmentIds",
    "Tokens",
    "widen",
]
