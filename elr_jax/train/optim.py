"""The optimizer: which rule and which rate each group of parameters gets.

Groups come from `ParamSpec.group`, never from a leaf's rank. Beside Muon:

    group      rule   peak rate                                decayed
    matrix     Muon   learning_rate                            yes
    embedding  AdamW  adam_learning_rate                       yes
    vector     AdamW  adam_learning_rate                       no
    loop       AdamW  adam_learning_rate · loop_lr_scale       no
    condition  AdamW  adam_learning_rate · condition_lr_scale  no
    balance    none   the train step moves it by the load      no

With `optimizer="adamw"` every group is AdamW and `learning_rate` stands for both rates. The condition group, which may
join in the middle of a run, follows the run's schedule times a warm-up that counts its own updates, as its moments do.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from elr_jax.errors import ElrError
from elr_jax.params import ParamSpec, map_specs

Optimizer = Literal["muon", "adamw"]
Decay = Literal["cosine", "wsd"]

ADAM_RMS = 0.2
"""Root mean square of an AdamW update at rate 1, as seen in training (Liu et al., arXiv:2502.16982)."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer, learning rates and their schedule."""

    optimizer: Optimizer = "muon"
    """What moves the matrices: Muon, or AdamW like everything else."""
    learning_rate: float = 3e-3
    """Peak rate of the matrices; with adamw, of everything."""
    adam_learning_rate: float = 3e-3
    """Peak AdamW rate of embeddings, vectors and loop parameters beside Muon."""
    loop_lr_scale: float = 1.0
    """Factor on the AdamW rate of the loop parameters: gates, injection, readout."""
    condition_lr_scale: float = 1.0
    """Factor on the AdamW rate of the conditioning."""
    condition_warmup_steps: int = 20
    """Steps of linear rise of the conditioning's rate, counted from its own first update; beside the run's warm-up."""
    schedule: Decay = "cosine"
    """After the warm-up: cosine decay, or wsd (stable, then linear decay in the last part of the run)."""
    warmup_steps: int = 100
    """Steps of linear rise from zero."""
    decay_fraction: float = 0.2
    """Last part of the run, in which wsd decays."""
    final_fraction: float = 0.1
    """Rate at the end of the run over the peak rate."""
    weight_decay: float = 0.1
    """Decay of matrices and embeddings per step, in units of the learning rate."""
    b1: float = 0.9
    """AdamW's first-moment decay."""
    b2: float = 0.95
    """AdamW's second-moment decay."""
    eps: float = 1e-8
    """AdamW's denominator offset."""
    momentum: float = 0.95
    """Muon's momentum decay."""
    clip_norm: float | None = 1.0
    """Largest global norm of the gradient; None leaves it alone."""

    def __post_init__(self):
        for name, choices in (("optimizer", get_args(Optimizer)), ("schedule", get_args(Decay))):
            if getattr(self, name) not in choices:
                raise ElrError(f"{name}={getattr(self, name)!r} is unknown: choose one of {', '.join(choices)}")
        for names, holds, allowed in (
            (("learning_rate", "adam_learning_rate", "eps", "clip_norm"), lambda x: 0 < x < math.inf, "above 0"),
            (
                ("loop_lr_scale", "condition_lr_scale", "warmup_steps", "condition_warmup_steps", "weight_decay"),
                lambda x: 0 <= x < math.inf,
                "of 0 or more",
            ),
            (("decay_fraction", "final_fraction"), lambda x: 0 <= x <= 1, "from 0 to 1"),
            (("b1", "b2", "momentum"), lambda x: 0 <= x < 1, "from 0 to below 1"),
        ):
            for name in names:
                value = getattr(self, name)
                if value is not None and not holds(value):
                    raise ElrError(f"{name}={value} is out of range: give a number {allowed}")


def learning_rate(config: OptimConfig, total_steps: int, *, peak: float | None = None) -> optax.Schedule:
    """The rate as a function of the step, for the matrices' peak rate unless another is given.

    Linear from 0 at step 0 to the peak at `warmup_steps`; then half a cosine (`cosine`), or the peak until
    `decay_fraction` of the run is left and a straight line (`wsd`), down to `final_fraction` of the peak at
    `total_steps`.
    """
    peak = config.learning_rate if peak is None else peak
    warmup = config.warmup_steps
    decay = total_steps - warmup if config.schedule == "cosine" else round(config.decay_fraction * total_steps)
    stable = total_steps - warmup - decay
    if warmup >= total_steps or stable < 0:
        raise ElrError(
            f"warmup_steps={warmup} leaves no room in a run of {total_steps} steps: shorten the warm-up, "
            "or decay_fraction of a wsd schedule"
        )
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, decay, config.final_fraction)
    elif decay:
        fall = optax.linear_schedule(peak, config.final_fraction * peak, decay)
        after = optax.join_schedules([optax.constant_schedule(peak), fall], [stable])
    else:
        after = optax.constant_schedule(peak)
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after


def muon_dimensions(spec: ParamSpec) -> MuonDimensionNumbers:
    """The spec's weight as the matrix that Muon makes orthogonal: its `inputs` axes by all the others.

    wq [D, N, H] is D by N·H, and wo [N, H, D] with two inputs is N·H by D; stacked matrices are as many of their own.
    """
    if not 0 < spec.inputs < len(spec.shape) - spec.stack:
        raise ElrError(f"a matrix of shape {spec.shape} has inputs={spec.inputs}: Muon needs axes on both sides")
    axes = tuple(range(spec.stack, len(spec.shape)))
    return MuonDimensionNumbers(reduction_axis=axes[: spec.inputs], output_axis=axes[spec.inputs :])


def make_optimizer(
    config: OptimConfig, specs: Any, total_steps: int, *, grafted_at: int = 0
) -> optax.GradientTransformation:
    """Global-norm clipping, then each group's rule; moments are float32.

    `grafted_at` is the step of the run in which the condition group is first updated.

    Muon's update is Nesterov momentum made orthogonal by five Newton-Schulz steps and scaled by
    `ADAM_RMS`·√max(fan_in, fan_out). An m×n orthogonal matrix has entries of size 1/√max(m, n), so every weight moves
    by the same amount per entry whatever its shape, and by as much as under AdamW: one learning rate and one decay
    serve every width and carry over from AdamW (Liu et al., arXiv:2502.16982). The customary factor
    √max(1, fan_out/fan_in) needs a rate of its own.
    """
    adam_peak = config.adam_learning_rate if config.optimizer == "muon" else config.learning_rate

    def adamw(scale: float, weight_decay: float) -> optax.GradientTransformation:
        return adamw_at(learning_rate(config, total_steps, peak=adam_peak * scale), weight_decay)

    def adamw_at(rate: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
        return optax.adamw(rate, config.b1, config.b2, config.eps, mu_dtype=jnp.float32, weight_decay=weight_decay)

    def matrices() -> optax.GradientTransformation:
        if config.optimizer == "adamw":
            return adamw(1.0, config.weight_decay)
        return muon(
            learning_rate(config, total_steps),
            beta=config.momentum,
            weight_decay=config.weight_decay,
            mu_dtype=jnp.float32,
            muon_weight_dimension_numbers=map_specs(
                lambda spec: muon_dimensions(spec) if spec.group == "matrix" else None, specs
            ),
            consistent_rms=ADAM_RMS,
        )

    def conditioning() -> optax.GradientTransformation:
        rate = learning_rate(config, total_steps, peak=adam_peak * config.condition_lr_scale)
        steps = max(config.condition_warmup_steps, 1)
        return adamw_at(lambda count: rate(grafted_at + count) * jnp.minimum((count + 1) / steps, 1.0), 0.0)

    groups = map_specs(lambda spec: spec.group, specs)
    rules: dict[Hashable, optax.GradientTransformation] = {
        "matrix": matrices(),
        "embedding": adamw(1.0, config.weight_decay),
        "vector": adamw(1.0, 0.0),
        "loop": adamw(config.loop_lr_scale, 0.0),
    }
    present = jax.tree.leaves(groups)
    if "condition" in present:  # a model without it keeps no count of its updates
        rules["condition"] = conditioning()
    if "balance" in present:
        rules["balance"] = optax.set_to_zero()
    split = optax.partition(rules, groups)
    return split if config.clip_norm is None else optax.chain(optax.clip_by_global_norm(config.clip_norm), split)
