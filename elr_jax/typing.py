"""The dimension letters of the whole project, and the array types spelled with them.

B batch · T query length · S key length · D model · N query heads · K key-value heads · H head dim · F feed-forward ·
V vocabulary · R rounds (loops) · W window.
"""

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

__all__ = [
    "Array",
    "Bool",
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
]
