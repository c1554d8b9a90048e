"""The gated delta product: each head's state S [H,V] fades a little with every token and is corrected P times.

For token t: S ← e^{g_t} S; then S ← S + β_{t,j} k_{t,j} (v_{t,j} − Sᵀ k_{t,j})ᵀ for its Householder steps j = 1 … P;
then o_t = H^{-1/2} Sᵀ q_t. P = 1 is Gated DeltaNet. (Yang et al., arXiv:2412.06464; Siems et al., arXiv:2502.10297.)

Three forms of one signature `(q, k, v, beta, g, state) -> (out, state)`: `sequential` is the definition, `chunked` does
many tokens at once with matrix products, `step` is a single chunk. Keys have norm 1 at most, 0 ≤ β ≤ 2 and g ≤ 0, so no
step stretches S. A token of β = g = 0 leaves S as it is, bit for bit, and one of g ≤ `RESET` forgets all before it
exactly. In this file V is the width of a value.

The WY form: within a chunk, token i finds what the chunk's earlier steps wrote. With G the running sum of g and
A_ij = β_i (k_i·k_j) e^{G_i−G_j} below the diagonal, the corrections of all steps are
u = (I + A)^{-1} (β v − β e^G k S), and the chunk ends with e^{G_end} S + Σ_j e^{G_end−G_j} k_j u_jᵀ.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from elr_jax.layers.linear import exact_product
from elr_jax.layers.triangular import SMALLEST, inverse_products, unit_lower_inverse
from elr_jax.typing import Array, Bool, Float, widen

RESET = -1024.0
"""A log decay whose exponential is 0 in float32 and float64."""

DeltaQueries = Float[Array, "B T N H"]
DeltaKeys = Float[Array, "B T P N H"]
DeltaValues = Float[Array, "B T P N V"]
StepSizes = Float[Array, "B T P N"]
LogDecays = Float[Array, "B T N"]
State = Float[Array, "B N H V"]
Outputs = Float[Array, "B T N V"]
Sums = tuple[Float[Array, "..."], ...]
"""Sums of log decays in two parts; a column for what fades, a row for what it fades since."""

_STEPS = 64  # of a chunk at most: longer ones cost more for pairs of steps than they save in rounds of the scan
_GRID = 16  # whole parts of log decays are counted in sixteenths, so that sums down to −2²⁰ are exact in float32


@struct.dataclass
class Update:
    """What R steps do to a state: S ← decay·S + keysᵀ (values − reads S)."""

    keys: Float[Array, "*batch R H"]
    reads: Float[Array, "*batch R H"]
    values: Float[Array, "*batch R V"]
    decay: Float[Array, "*batch"]

    def corrections(self, state: Float[Array, "*batch H V"]) -> Float[Array, "*batch R V"]:
        """What the steps find missing: u = values − reads S."""
        return self.values - exact_product(self.reads, state)

    def __call__(self, state: Float[Array, "*batch H V"]) -> Float[Array, "*batch H V"]:
        """The state after the steps."""
        found = exact_product(jnp.swapaxes(self.keys, -1, -2), self.corrections(state))
        return self.decay[..., None, None] * state + found


@struct.dataclass
class Chunk:
    """Some tokens: u = inverse (values − reads S), o = queries S + inner u, S ← decay·S + keysᵀ u."""

    queries: Float[Array, "*batch C H"]
    inner: Float[Array, "*batch C R"]
    inverse: Float[Array, "*batch R R"]
    keys: Float[Array, "*batch R H"]
    reads: Float[Array, "*batch R H"]
    values: Float[Array, "*batch R V"]
    decay: Float[Array, "*batch 1 1"]

    def run(self, state: Float[Array, "*batch H V"]) -> tuple[Float[Array, "*batch H V"], Float[Array, "*batch C V"]]:
        """The state after the tokens and their outputs."""
        found = exact_product(self.inverse, self.values - exact_product(self.reads, state))
        after = self.decay * state + exact_product(jnp.swapaxes(self.keys, -1, -2), found)
        return after, self.outputs(state, found)

    def outputs(
        self, state: Float[Array, "*batch H V"], found: Float[Array, "*batch R V"]
    ) -> Float[Array, "*batch C V"]:
        """What the tokens read of the state before them and of what their steps found missing."""
        return exact_product(self.queries, state) + exact_product(self.inner, found)

    def update(self) -> Update:
        """What the tokens do to any state."""
        solved = exact_product(self.inverse, jnp.concatenate([self.values, self.reads], axis=-1))
        values, reads = jnp.split(solved, [self.values.shape[-1]], axis=-1)
        return Update(keys=self.keys, reads=reads, values=values, decay=self.decay[..., 0, 0])


def sequential(
    q: DeltaQueries, k: DeltaKeys, v: DeltaValues, beta: StepSizes, g: LogDecays, state: State
) -> tuple[Outputs, State]:
    """The definition, one Householder step after another."""

    def token(state: State, inputs: tuple[Array, ...]) -> tuple[State, Float[Array, "B N V"]]:
        q, k, v, beta, g = inputs
        state = jnp.exp(g)[..., None, None] * state
        for j in range(k.shape[1]):
            missing = v[:, j] - exact_product(k[:, j, :, None], state)[..., 0, :]
            state = state + k[:, j, ..., None] * (beta[:, j, :, None] * missing)[..., None, :]
        return state, exact_product(q[..., None, :], state)[..., 0, :]

    inputs = (widen(q) * q.shape[-1] ** -0.5, *map(widen, (k, v, beta)), jnp.maximum(widen(g), RESET))
    state, out = jax.lax.scan(token, state, tuple(jnp.moveaxis(x, 1, 0) for x in inputs))
    return jnp.moveaxis(out, 0, 1), state


def chunked(
    q: DeltaQueries, k: DeltaKeys, v: DeltaValues, beta: StepSizes, g: LogDecays, state: State
) -> tuple[Outputs, State]:
    """The same in chunks: matrix products inside them, a scan over them. Time and memory grow with T.

    The backward pass keeps each chunk's state and makes the rest again, which costs less than to fetch it from memory.
    """
    batch, length, heads, _ = q.shape

    @partial(jax.checkpoint, prevent_cse=False)  # a scan's body needs no guard against it
    def one(state: State, tokens: tuple[Array, ...]) -> tuple[State, Float[Array, "B N C V"]]:
        return _chunk(*tokens).run(state)

    state, out = jax.lax.scan(one, state, _cut(q, k, v, beta, g))
    return jnp.transpose(out, (1, 0, 3, 2, 4)).reshape(batch, -1, heads, v.shape[-1])[:, :length], state


def step(
    q: DeltaQueries, k: DeltaKeys, v: DeltaValues, beta: StepSizes, g: LogDecays, state: State
) -> tuple[Outputs, State]:
    """The same for few tokens, such as the one of a decode step, as one chunk that reads and writes the state once."""
    out, update = read(q, k, v, beta, g, state)
    return out, update(state)


def read(
    q: DeltaQueries, k: DeltaKeys, v: DeltaValues, beta: StepSizes, g: LogDecays, state: State
) -> tuple[Outputs, Update]:
    """Outputs of tokens after `state`, and what the tokens do to any state: its size does not grow with T.

    For more than one chunk, the tokens run once from [0 | I]: with U and M the two parts of where that ends, any
    state goes to U + M S, and so do the states that the outputs are read from.
    """
    if q.shape[1] <= chunk_tokens(q.shape[1], k.shape[2]):
        chunk = _chunk(*(x[0] for x in _cut(q, k, v, beta, g)))
        update = chunk.update()
        out = chunk.outputs(state, update.corrections(state))
        return jnp.swapaxes(out, 1, 2)[:, : q.shape[1]], update
    width, rank = v.shape[-1], q.shape[-1]
    eye = jnp.broadcast_to(jnp.eye(rank, dtype=state.dtype), (*state.shape[:-1], rank))
    start = jnp.concatenate([jnp.zeros_like(state), eye], axis=-1)
    out, end = chunked(q, k, jnp.pad(v, [(0, 0)] * 4 + [(0, rank)]), beta, g, start)
    own, through = out[..., :width], out[..., width:]
    out = own + jnp.swapaxes(exact_product(jnp.swapaxes(through, 1, 2), state), 1, 2)
    decay = jnp.zeros(state.shape[:-2], state.dtype)
    return out, Update(keys=eye, reads=-end[..., width:], values=end[..., :width], decay=decay)


def chunk_tokens(length: int, steps: int) -> int:
    """Tokens of a chunk: a power of two, the sequence's own length rounded up if that is less."""
    most = 1 << max(0, (_STEPS // steps).bit_length() - 1)
    return min(most, 1 << (length - 1).bit_length())


def rule_flops(length: int, *, steps: int, key_dim: int, value_dim: int) -> float:
    """Operations of one head's products in `chunked`, averaged over the tokens of a sequence."""
    tokens = chunk_tokens(length, steps)
    rows = tokens * steps
    inside = rows * rows * (key_dim + value_dim) + inverse_products(rows) + tokens * rows * (key_dim + value_dim)
    across = (2 * rows + tokens) * key_dim * value_dim
    return 2 * (inside + across) * -(-length // tokens) / length


def _cut(q: DeltaQueries, k: DeltaKeys, v: DeltaValues, beta: StepSizes, g: LogDecays) -> tuple[Array, ...]:
    """The tokens chunk by chunk on a first axis, head-major; the last is filled up with tokens that do nothing."""
    batch, length, steps, heads, _ = k.shape
    tokens = chunk_tokens(length, steps)

    def cut(x: Array, rows: int) -> Array:
        """[B, T, …, N, X] → [chunks, B, N, rows, X]."""
        x = jnp.pad(widen(x), [(0, 0), (0, -length % tokens)] + [(0, 0)] * (x.ndim - 2))
        return jnp.transpose(x.reshape(batch, -1, rows, heads, x.shape[-1]), (1, 0, 3, 2, 4))

    k, v, beta = (cut(x, tokens * steps) for x in (k, v, beta[..., None]))
    return cut(q, tokens) * q.shape[-1] ** -0.5, k, v, beta, cut(g[..., None], tokens)[..., 0]


def _chunk(
    q: Float[Array, "*batch C H"],
    k: Float[Array, "*batch R H"],
    v: Float[Array, "*batch R V"],
    beta: Float[Array, "*batch R 1"],
    g: Float[Array, "*batch C"],
) -> Chunk:
    """The WY form of a chunk's tokens."""
    tokens = decay_sums(g)
    steps = tuple(jnp.repeat(part, k.shape[-2] // q.shape[-2], axis=-1) for part in tokens)
    column = lambda sums: tuple(part[..., None] for part in sums)
    return chunk(q, k, v, beta, column(tokens), column(steps), tuple(part[..., None, :] for part in steps))


def chunk(
    q: Float[Array, "*batch C H"],
    k: Float[Array, "*batch R H"],
    v: Float[Array, "*batch R V"],
    beta: Float[Array, "*batch R 1"],
    tokens: Sums,
    steps: Sums,
    row: Sums,
    *,
    smallest: int = SMALLEST,
) -> Chunk:
    """The WY form from sums of log decays, columns up to each token and each step, these also as a row.

    It has products and elementwise arithmetic alone, which TPU kernels know too; `smallest` as in `unit_lower_inverse`.
    """
    transposed = jnp.swapaxes(k, -1, -2)
    count = k.shape[-2] // q.shape[-2]
    indices = lambda rows: (jax.lax.broadcasted_iota(jnp.int32, (rows, k.shape[-2]), axis) for axis in (0, 1))
    (i, j), (token, step) = indices(k.shape[-2]), indices(q.shape[-2])
    end = tuple(part[..., -1:, :] for part in steps)
    since = _fade(steps)
    return Chunk(
        queries=q * _fade(tokens),
        inner=exact_product(q, transposed) * _fade(tokens, row, step < (token + 1) * count),
        inverse=unit_lower_inverse(beta * exact_product(k, transposed) * _fade(steps, row, j < i), smallest),
        keys=k * _fade(end, steps),
        reads=beta * since * k,
        values=beta * v,
        decay=since[..., -1:, :],
    )


def decay_sums(g: Float[Array, "*batch C"]) -> Sums:
    """Running sums of log decays in two parts, multiples of 1/16 and the rest.

    A difference of large sums would lose the digits of a small one; multiples of 1/16 are summed exactly.
    """
    g = jnp.maximum(g, RESET)
    whole = jax.lax.stop_gradient(jnp.round(g * _GRID) / _GRID)
    return jnp.cumsum(whole, axis=-1), jnp.cumsum(g - whole, axis=-1)


def _fade(
    after: Sums, before: Sums | None = None, seen: Bool[Array, "I J"] | None = None
) -> Float[Array, "*batch I J"]:
    """e^{G_i−G_j} of sums G_i and G_j, those before the chunk if there are none, and 0 for what i has not seen."""
    between = sum(after) if before is None else sum(a - b for a, b in zip(after, before, strict=True))
    return jnp.exp(between if seen is None else jnp.where(seen, between, RESET))
