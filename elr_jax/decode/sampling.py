"""From logits to the next token: temperature, top-k, top-p and min-p, with parameters and a key for each row."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from elr_jax.errors import ElrError
from elr_jax.typing import Array, Float, Int, Key

RowLogits = Float[Array, "B V"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request draws its tokens; the default is greedy."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the largest."""
    top_k: int = 0
    """Draw among the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Draw among the fewest tokens whose probability reaches p; 1 is off."""
    min_p: float = 0.0
    """Draw among tokens at least p times as likely as the likeliest; 0 is off."""
    seed: int = 0
    """The draws are a function of the seed and the number of the token, whatever else is in the batch."""

    def __post_init__(self):
        for name, allowed, good in (
            ("temperature", "0 (greedy) or more", 0 <= self.temperature < math.inf),
            ("top_k", "0 (off) or more", 0 <= self.top_k < 2**31),
            ("top_p", "above 0 and at most 1 (off)", 0 < self.top_p <= 1),
            ("min_p", "0 (off) to 1", 0 <= self.min_p <= 1),
            ("seed", "0…2³²−1", 0 <= self.seed < 2**32),
        ):
            if not good:
                raise ElrError(f"sampling.{name}={getattr(self, name)} is out of range: use {allowed}")


GREEDY = Sampling()


def filter_logits(
    logits: RowLogits,
    temperature: Float[Array, "B"],
    top_k: Int[Array, "B"],
    top_p: Float[Array, "B"],
    min_p: Float[Array, "B"],
) -> RowLogits:
    """(logits − max)/temperature, with −∞ for every token that top-k, then top-p of what is left, then min-p rule out.

    Tokens as likely as the last one kept are kept too. A temperature of 0 counts as 1 here: `sample` takes the maximum.
    """
    scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = scaled / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    ranking = jnp.any((top_k > 0) | (top_p < 1))  # the only need of a sort
    nothing = jnp.full(scaled.shape[0], -jnp.inf, scaled.dtype)
    floor = jax.lax.cond(ranking, lambda: _nucleus_floor(scaled, top_k, top_p), lambda: nothing)
    floor = jnp.maximum(floor, jnp.log(min_p))  # p ≥ min_p · p_max, since the largest is 0
    return jnp.where(scaled >= floor[:, None], scaled, -jnp.inf)


def _nucleus_floor(scaled: RowLogits, top_k: Int[Array, "B"], top_p: Float[Array, "B"]) -> Float[Array, "B"]:
    """The smallest logit that top-k and top-p keep in each row."""
    ranked = jnp.sort(scaled, axis=-1, descending=True)
    last = jnp.clip(top_k - 1, 0, scaled.shape[-1] - 1)
    kth = jnp.take_along_axis(ranked, last[:, None], axis=-1)
    kept = (ranked >= kth) | (top_k == 0)[:, None]
    mass = jnp.cumsum(jax.nn.softmax(ranked, axis=-1, where=kept), axis=-1)
    before = jnp.pad(mass[:, :-1], ((0, 0), (1, 0)))
    kept &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    return jnp.min(ranked, axis=-1, where=kept, initial=jnp.inf)


def sample(
    logits: RowLogits,
    keys: Key[Array, "B"],
    temperature: Float[Array, "B"],
    top_k: Int[Array, "B"],
    top_p: Float[Array, "B"],
    min_p: Float[Array, "B"],
) -> Int[Array, "B"]:
    """The next token of each row, drawn with the row's own key; the likeliest where its temperature is 0."""

    def draw() -> Int[Array, "B"]:
        drawn = jax.vmap(jax.random.categorical)(keys, filter_logits(logits, temperature, top_k, top_p, min_p))
        return jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1))

    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: jnp.argmax(logits, axis=-1)).astype(jnp.int32)
