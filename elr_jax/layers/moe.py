"""Mixture of experts (`E`): each token goes to its k best of E feed-forward experts, and to one that all share.

With x the normed hidden state and p = σ(x R) the router's scores, in float32,

    experts(t) = the k largest of p_t + bias,    w_te = scale · p_te / Σ_e p_te over these,
    y_t = Σ_e w_te f_e(x_t) + f_shared(x_t).

The bias only selects: no gradient reaches it, `balanced` moves it against the load. No token is dropped: tokens are
sorted by expert and a grouped product runs each expert on its own, so a token's output depends on no other token.

Rounds of the core may replay the routes of the first (`MoEConfig.replay`): experts are those of round one, weights are
this round's scores of them, so the router keeps its gradient. [ELR, Megatron-LM, DeepSeek-V3]
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from elr_jax.config import MLPConfig, ModelConfig, MoEConfig
from elr_jax.layers.attention import Context
from elr_jax.layers.grouped import grouped_product
from elr_jax.layers.linear import wide_product
from elr_jax.layers.mlp import MLP, activation, mlp, mlp_specs
from elr_jax.params import matrix, vector
from elr_jax.sharding import OF_EXPERTS, on_own_rows
from elr_jax.typing import Array, Float, Hidden, Int32, widen

Experts = Int32[Array, "B T k"]


@struct.dataclass
class MoE:
    """Weights of one mixture; `gate` is None for squared ReLU, `shared` where all experts are routed to."""

    router: Float[Array, "D E"]
    bias: Float[Array, "E"]
    gate: Float[Array, "E D F"] | None
    up: Float[Array, "E D F"]
    down: Float[Array, "E F D"]
    shared: MLP | None


@struct.dataclass
class Routing:
    """What a mixture did in the passes so far, finished examples left out: sums over executions, one a round.

    Losses are means over a row's tokens. What compares a replayed route with the fresh one of its round is zero unless
    `Context.probe` asks for it.
    """

    experts: Experts
    """Of the newest execution."""
    load: Float[Array, "B E"]
    """Tokens an expert was given."""
    balance: Float[Array, "B"]
    """Σ_e f_e P_e with f_e = E/k · share of tokens given to e, P_e = mean of p_te / Σ_e p_te: 1 where all is even."""
    z: Float[Array, "B"]
    """Mean of (log Σ_e exp(x R)_e)²."""
    overlap: Float[Array, "B"]
    """Share of a token's experts that a fresh route has too."""
    cosine: Float[Array, "B"]
    """Cosine between the layer's output and that of a fresh route."""


def moe_sizes(config: ModelConfig) -> MoEConfig:
    """Sizes of the mixtures; the config refuses an `E` without them."""
    assert config.moe is not None
    return config.moe


def moe_specs(config: ModelConfig, output_gain: float) -> MoE:
    """Parameter declarations of one mixture."""
    sizes, d = moe_sizes(config), config.d_model
    e, f = sizes.num_experts, sizes.d_expert
    wide = matrix((e, d, f), ("expert", "embed", "mlp"), stack=1)
    shared = None
    if sizes.d_shared:
        dense = dataclasses.replace(config, mlp=MLPConfig(d_ff=sizes.d_shared, kind=sizes.kind))
        shared = mlp_specs(dense, output_gain)
    return MoE(
        router=matrix((d, e), ("embed", None), group="embedding", wide=True),
        bias=vector((e,), (None,), 0.0, group="balance"),
        gate=wide if sizes.kind == "swiglu" else None,
        up=wide,
        down=matrix((e, f, d), ("expert", "mlp", "embed"), stack=1, gain=output_gain),
        shared=shared,
    )


def start_routing(config: ModelConfig, batch: int, length: int) -> Routing:
    """What a mixture has done before its first execution."""
    sizes = moe_sizes(config)
    zero = jnp.zeros(batch)
    return Routing(
        experts=jnp.zeros((batch, length, sizes.top_k), jnp.int32),
        load=jnp.zeros((batch, sizes.num_experts)),
        balance=zero,
        z=zero,
        overlap=zero,
        cosine=zero,
    )


def moe(
    x: Hidden, params: MoE, context: Context, config: ModelConfig, *, past: Routing | None = None
) -> tuple[Hidden, Routing | None]:
    """The mixture's output, and what it did in all so far (None where `past` is)."""
    sizes = moe_sizes(config)
    logits = wide_product(widen(x), params.router)
    scores = jax.nn.sigmoid(logits)
    select = lambda: choose(scores, params.bias, sizes.top_k)
    if past is None or context.round is None or not sizes.replay:
        experts = select()
    else:
        first = (context.round == 0).reshape(-1, 1, 1)  # of all examples, or of each one
        experts = jax.lax.cond(jnp.any(first), lambda: jnp.where(first, select(), past.experts), lambda: past.experts)
    shared = 0 if params.shared is None else mlp(x, params.shared, config)
    output = lambda experts: shared + run_experts(x, experts, weigh(scores, experts, sizes), params, config)
    y = output(experts)
    if past is None:
        return y, None
    balance, load = _balance(scores, experts)
    done = past.replace(  # pyright: ignore
        experts=experts,
        load=past.load + load,
        balance=past.balance + balance,
        z=past.z + jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)), axis=1),
    )
    if context.probe:
        fresh = select()
        done = done.replace(
            overlap=past.overlap + shared_experts(experts, fresh), cosine=past.cosine + _cosine(y, output(fresh))
        )
    return y, done


def choose(scores: Float[Array, "B T E"], bias: Float[Array, "E"], top_k: int) -> Experts:
    """The experts with the largest biased scores, best first."""
    return jax.lax.top_k(jax.lax.stop_gradient(scores + bias), top_k)[1]


def weigh(scores: Float[Array, "B T E"], experts: Experts, sizes: MoEConfig) -> Float[Array, "B T k"]:
    """Weights of the chosen experts: their scores without the bias, normed to `route_scale`."""
    chosen = jnp.take_along_axis(scores, experts, axis=-1)
    total = jnp.sum(chosen, axis=-1, keepdims=True)
    return sizes.route_scale * chosen / jnp.maximum(total, jnp.finfo(total.dtype).tiny)


def run_experts(
    x: Hidden, experts: Experts, weights: Float[Array, "B T k"], params: MoE, config: ModelConfig
) -> Hidden:
    """Σ over a token's experts of weight ⊙ expert(x), every expert run once on all its tokens.

    Each rank of a mesh sorts its own rows, with its experts' weights gathered. On an axis of experts each device runs
    its own on the rows of all devices along it: rows are gathered and their sums scattered, weights stay where they
    are. Where `tensor` cuts an expert's inner width, what is summed is a token's output, not that of each expert.
    """
    count = moe_sizes(config).num_experts
    specs = moe_specs(config, 1.0)
    # a device's own experts by number: XLA for TPUs (libtpu 0.0.42) refuses the device's index here
    weighed = jnp.arange(count), params.gate, params.up, params.down
    declared = vector((count,), ("expert",), 0.0), specs.gate, specs.up, specs.down

    def run(weighed: Any, rows: Any) -> Hidden:
        return _sum_of(*rows, *weighed, count=count)

    return on_own_rows(run, weighed, (x, experts, weights), declared, apart=OF_EXPERTS)


def _sum_of(
    x: Hidden,
    experts: Experts,
    weights: Float[Array, "B T k"],
    numbers: Int32[Array, "own"],
    gate: Float[Array, "own D F"] | None,
    up: Float[Array, "own D F"],
    down: Float[Array, "own F D"],
    *,
    count: int,
) -> Hidden:
    """What some experts, by their consecutive `numbers` of `count` in all, add to each token."""
    top_k, own = experts.shape[-1], up.shape[0]
    flat = (experts.reshape(-1) - numbers[0]) % count  # one's own come first when sorted
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=count)[:own].astype(jnp.int32)
    rows = x.reshape(-1, x.shape[-1])[order // top_k]
    inner = activation(grouped_product(rows, up, sizes), None if gate is None else grouped_product(rows, gate, sizes))
    outputs = grouped_product(inner, down, sizes)[jnp.argsort(order)].reshape(*experts.shape, -1)
    return jnp.sum(widen(outputs) * weights[..., None], axis=2).astype(x.dtype)


def balanced(params: MoE, load: Float[Array, "E"], rate: float) -> MoE:
    """The mixture with its bias moved by `rate` towards experts with less than the mean load. [DeepSeek-V3]"""
    return params.replace(bias=params.bias + rate * jnp.sign(jnp.mean(load) - load))  # pyright: ignore


def _balance(scores: Float[Array, "B T E"], experts: Experts) -> tuple[Float[Array, "B"], Float[Array, "B E"]]:
    """The balance loss of each row, and its load."""
    batch, length, count = scores.shape
    load = jax.vmap(lambda row: jnp.bincount(row, length=count))(experts.reshape(batch, -1)).astype(scores.dtype)
    share = load * (count / (length * experts.shape[-1]))
    mean = jnp.mean(scores / jnp.sum(scores, axis=-1, keepdims=True), axis=1)
    return jnp.sum(share * mean, axis=-1), load


def shared_experts(experts: Experts, others: Experts) -> Float[Array, "B"]:
    """Share of a row's experts that its tokens have in the other routes too."""
    same = jnp.any(experts[..., :, None] == others[..., None, :], axis=-1)
    return jnp.mean(same, axis=(1, 2), dtype=jnp.float32)


def _cosine(y: Hidden, fresh: Hidden) -> Float[Array, "B"]:
    y, fresh = widen(y), widen(fresh)
    norms = jnp.linalg.norm(y, axis=-1) * jnp.linalg.norm(fresh, axis=-1)
    return jnp.mean(jnp.sum(y * fresh, axis=-1) / jnp.maximum(norms, jnp.finfo(norms.dtype).tiny), axis=1)
