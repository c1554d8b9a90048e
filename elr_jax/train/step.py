"""The train step: draw depths, sort by depth, accumulate gradients over microbatches, update.

One compiled program serves every draw. Gradients are those of the mean loss over the whole batch's scored tokens,
however depths and masks fall into the microbatches: each microbatch adds its summed loss divided by the global weight.
The selection biases of mixtures of experts have no gradient; the step's whole load moves them after the update.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elr_jax import model, parameters
from elr_jax.config import Runtime
from elr_jax.depth import executed_rounds, sort_by_depth, useful_rounds
from elr_jax.losses import DepthSums, sum_by_depth
from elr_jax.parameters import Params
from elr_jax.params import leaves_by_path, onto_sphere, overlay, path_name
from elr_jax.sharding import DEFAULT_RULES, Rules, constrain, num_ranks, param_shardings
from elr_jax.train.data import Batch
from elr_jax.train.optim import make_optimizer
from elr_jax.train.settings import Recipe
from elr_jax.typing import Array, Depth, Float, Int32, Key, PRNGKeyArray


@struct.dataclass
class TrainState:
    """Everything a run carries from step to step; `key` never changes, draws fold it with the step."""

    step: Int32[Array, ""]
    params: Any
    """A `Params`; optax has a type of that name for any tree."""
    opt_state: Any
    key: PRNGKeyArray
    skipped: Int32[Array, ""]
    """Steps whose gradient was not finite; they changed nothing."""


@struct.dataclass
class RoutingSums:
    """What the mixtures of experts did, every execution of them counted."""

    load: Float[Array, "layers E"]
    """Tokens an expert was given."""
    balance: Float[Array, ""]
    """Σ over tokens of weight times the balance losses of the token's row."""
    z: Float[Array, ""]
    """The same of the z losses."""


@struct.dataclass
class StepMetrics:
    """What one step reports."""

    by_depth: DepthSums
    grad_norm: Float[Array, ""]
    executed_rounds: Int32[Array, ""]
    """Row-rounds that were run: on each rank of a mesh each microbatch is as deep as the rank's deepest row."""
    idle_rounds: Int32[Array, ""]
    """Row-rounds that ranks waited for the deepest one of each microbatch."""
    useful_rounds: Int32[Array, ""]
    """Row-rounds the draw asked for: Σ depth."""
    skipped: Int32[Array, ""]
    routing: RoutingSums | None
    """None for a model without mixtures of experts."""

    @property
    def loss(self) -> Float[Array, ""]:
        """Mean nats per scored token of the batch."""
        return jnp.sum(self.by_depth.loss) / jnp.maximum(jnp.sum(self.by_depth.weight), 1.0)


def init_state(recipe: Recipe, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step, a function of the recipe's seed alone."""
    init_key, run_key = jax.random.split(jax.random.key(recipe.seed))
    params: Any = parameters.init(init_key, recipe.model)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(step=zero, params=params, opt_state=optimizer.init(params), key=run_key, skipped=jnp.copy(zero))


def state_shardings(recipe: Recipe, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> TrainState:
    """The sharding of every leaf of the state: an optimizer's moments lie where their parameters do."""
    shapes = jax.eval_shape(partial(init_state, recipe, optimizer_for(recipe)))
    places = leaves_by_path(param_shardings(parameters.param_specs(recipe.model), mesh, rules))
    params = leaves_by_path(shapes.params)

    def of(path: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        names = path_name(path).split("/")
        ends = ("/".join(names[start:]) for start in range(len(names)))
        # what an optimizer keeps of a parameter in another shape is small: it stays whole
        own = next((end for end in ends if end in params and params[end].shape == leaf.shape), None)
        return NamedSharding(mesh, PartitionSpec()) if own is None else places[own]

    return jax.tree.map_with_path(of, shapes)


def optimizer_for(recipe: Recipe) -> optax.GradientTransformation:
    """The optimizer of the recipe's model."""
    specs = parameters.param_specs(recipe.model)
    return make_optimizer(recipe.optim, specs, recipe.steps, grafted_at=recipe.graft_step)


def graft_state(state: TrainState, *, recipe: Recipe, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before a graft as the recipe's model goes on from it: what there was as it is, all else fresh."""
    return overlay(init_state(recipe, optimizer), state)


def draw_depths(recipe: Recipe, key: PRNGKeyArray, step: Int32[Array, ""]) -> Depth:
    """Loop count of every row of the global batch at a step."""
    rows = jnp.arange(recipe.batch_size, dtype=jnp.int32)
    return recipe.depth.sample(key, step, rows, batch_size=recipe.batch_size, total_steps=recipe.steps)


def train_step(
    state: TrainState, batch: Batch, *, recipe: Recipe, optimizer: optax.GradientTransformation, runtime: Runtime
) -> tuple[TrainState, StepMetrics]:
    """One optimizer step; a gradient that is not finite leaves parameters and optimizer as they were and is counted."""
    depth_key, noise_key = jax.random.split(state.key)
    depth = draw_depths(recipe, depth_key, state.step)
    noise_keys = jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.fold_in(noise_key, state.step), jnp.arange(recipe.batch_size)
    )
    gradient, (by_depth, routing) = gradient_by_depth(
        state.params, batch, depth, noise_keys, recipe=recipe, runtime=runtime
    )

    grad_norm = optax.tree.norm(gradient)
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    if recipe.model.sphere:
        params = onto_sphere(params, parameters.param_specs(recipe.model))
    if routing is not None:
        params = parameters.balance_routers(params, routing.load, recipe.routing.bias_rate, config=recipe.model)
    ranks = num_ranks() if runtime.gather_core else 1
    depth = depth[sort_by_depth(depth, recipe.microbatches)]
    rounds = executed_rounds(depth, recipe.microbatches * ranks)
    finite = jnp.isfinite(grad_norm)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (params, opt_state),
        (state.params, state.opt_state),
    )
    skipped = state.skipped + jnp.where(finite, 0, 1)
    metrics = StepMetrics(
        by_depth=by_depth,
        grad_norm=grad_norm,
        executed_rounds=rounds,
        idle_rounds=executed_rounds(depth, recipe.microbatches) - rounds,
        useful_rounds=useful_rounds(depth),
        skipped=skipped,
        routing=routing,
    )
    return TrainState(step=state.step + 1, params=params, opt_state=opt_state, key=state.key, skipped=skipped), metrics


def gradient_by_depth(
    params: Params, batch: Batch, depth: Depth, keys: Key[Array, "B"], *, recipe: Recipe, runtime: Runtime
) -> tuple[Any, tuple[DepthSums, RoutingSums | None]]:
    """Gradient of the batch's mean loss in nats, in microbatches of rows sorted by depth, and the sums of all rows.

    Whatever the recipe's `microbatches`, the runtime and the mesh, it is the same but for rounding.
    """
    order = sort_by_depth(depth, recipe.microbatches)
    rows, *rest = jax.tree.map(lambda x: _cut(x[order], recipe.microbatches), (batch, depth, keys))
    rows = jax.tree.map(lambda x: constrain(x, None, "batch", "sequence"), rows)
    loss_function = partial(batch_loss, recipe=recipe, runtime=runtime)
    return accumulate(loss_function, params, (rows, *rest), total=jnp.sum(batch.weights))


def batch_loss(
    params: Params, part: tuple[Batch, Depth, PRNGKeyArray], *, recipe: Recipe, runtime: Runtime
) -> tuple[Float[Array, ""], tuple[DepthSums, RoutingSums | None]]:
    """Summed loss of some rows in nats, and the sums by loop count and of the mixtures of experts."""
    batch, depth, keys = part
    total, scores = model.loss(
        params,
        batch.tokens,
        batch.targets,
        batch.weights,
        depth,
        config=recipe.model,
        runtime=runtime,
        segment_ids=batch.segment_ids,
        key=keys,
        backprop_loops=recipe.backprop_loops,
    )
    by_depth = sum_by_depth(scores.loss, batch.weights, depth, max_loops=recipe.model.loop.max_loops)
    if not scores.routing:
        return total, (by_depth, None)
    weight = jnp.sum(batch.weights, axis=1)
    routing = RoutingSums(
        load=jnp.stack([jnp.sum(one.load, axis=0) for one in scores.routing]),
        balance=jnp.sum(weight * sum(one.balance for one in scores.routing)),
        z=jnp.sum(weight * sum(one.z for one in scores.routing)),
    )
    total = total + recipe.routing.balance_loss * routing.balance + recipe.routing.z_loss * routing.z
    return total, (by_depth, jax.lax.stop_gradient(routing))


def accumulate(
    loss_function: Callable[..., tuple[Float[Array, ""], Any]],
    params: Any,
    parts: Any,
    *,
    total: Float[Array, ""],
) -> tuple[Any, Any]:
    """Gradient of Σ over parts of loss / total, and the summed metrics; parts are stacked on their first axis."""
    scale = 1.0 / jnp.maximum(total, 1.0)

    def one(carry: tuple[Any, Any], part: Any):
        (_, sums), gradient = jax.value_and_grad(loss_function, has_aux=True)(params, part)
        gradient = jax.tree.map(lambda g: g * scale, gradient)
        return jax.tree.map(jnp.add, carry, (gradient, sums)), None

    shapes = jax.eval_shape(loss_function, params, jax.tree.map(lambda x: x[0], parts))[1]
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (params, shapes))
    return jax.lax.scan(one, start, parts)[0]


def _cut(x: Array, parts: int) -> Array:
    return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])
