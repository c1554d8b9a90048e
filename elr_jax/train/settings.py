"""Everything a training run is told: the recipe, which a checkpoint pins, and how this launch goes about it."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from elr_jax.config import ModelConfig, Runtime, to_dict
from elr_jax.depth import LAW_UNIONS, DepthLaw, Fixed, Switch
from elr_jax.errors import ElrError
from elr_jax.train.data import DataConfig
from elr_jax.train.optim import OptimConfig
from elr_jax.train.processes import Processes


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How the routers of mixtures of experts are kept in balance; of no effect on a model without them."""

    balance_loss: float = 1e-4
    """Factor of the balance loss that each execution of a mixture adds to a token's nats."""
    z_loss: float = 0.0
    """Factor of the squared log-sum of the router's exponentials that each execution adds."""
    bias_rate: float = 1e-3
    """Step of the selection biases towards experts with less than the mean load."""

    def __post_init__(self):
        for name in ("balance_loss", "z_loss", "bias_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ElrError(f"routing.{name}={getattr(self, name)} must be a number of 0 or more")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What determines the trained parameters; a run can only be resumed with the recipe it began with."""

    model: ModelConfig
    depth: DepthLaw
    """How many loops each row of a batch runs."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    steps: int = 600
    batch_size: int = 16
    """Rows of one optimizer step, over all processes."""
    microbatches: int = 4
    """Parts a batch is cut into after sorting by depth; each part runs as deep as its deepest row."""
    backprop_loops: int | None = None
    """Last rounds of each row that carry gradients; None means all."""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "batch_size", "microbatches", "backprop_loops"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ElrError(f"{name}={value} must be at least 1")
        if self.batch_size % self.microbatches:
            raise ElrError(
                f"batch_size={self.batch_size} can't be cut into microbatches={self.microbatches}: use a divisor"
            )
        if self.depth.max_loops > self.model.loop.max_loops:
            raise ElrError(
                f"the depth law draws up to {self.depth.max_loops} loops but model.loop.max_loops="
                f"{self.model.loop.max_loops}: raise it, or lower the law's"
            )

    @property
    def graft_step(self) -> int:
        """Steps after which conditioning is grafted onto the model: those before a late switch; else 0."""
        if self.model.conditioning is None or not isinstance(self.depth, Switch):
            return 0
        return self.depth.first_step(self.steps)

    def at(self, step: int) -> "Recipe":
        """What trains the given step (from 0): before a graft, the model without conditioning at one loop."""
        if step >= self.graft_step:
            return self
        loop = dataclasses.replace(self.model.loop, max_loops=1)
        model = dataclasses.replace(self.model, conditioning=None, loop=loop)
        return dataclasses.replace(self, model=model, depth=Fixed(loops=1))

    def to_dict(self) -> dict[str, Any]:
        """The recipe as JSON-ready data."""
        return to_dict(self, unions=LAW_UNIONS)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Where this launch writes and how often; free to change between launches of one run."""

    out: str
    """The run's folder; if it holds checkpoints, the run goes on from the newest."""
    eval_every: int | None = None
    """Steps between evaluations; None evaluates at the end only."""
    eval_batches: int = 20
    """Validation batches of one evaluation."""
    save_every: int | None = None
    """Steps between checkpoints; None saves at the end only (and on SIGTERM)."""
    keep: int = 2
    """Newest checkpoints that stay."""
    mesh: str | None = None
    """Devices by mesh axis, such as data=2,fsdp=4 (`elr_jax.sharding`); None: one device, or data=all of them where
    there are several processes."""
    processes: Processes = field(default_factory=Processes)
    """Those that train together; a single machine needs none of it."""
    peak_tflops: float | None = None
    """Operations a second of one device at best, in 10¹², which `mfu` is a share of; None: the maker's figure for dense
    bfloat16, and no `mfu` where it is not known."""
    runtime: Runtime = field(default_factory=Runtime)

    def __post_init__(self):
        if self.peak_tflops is not None and not 0 < self.peak_tflops < math.inf:
            raise ElrError(f"peak_tflops={self.peak_tflops} must be above 0")
        for name in ("eval_every", "eval_batches", "save_every", "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ElrError(f"{name}={value} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class TextRun:
    """One training run on text."""

    recipe: Recipe
    launch: Launch
    data: DataConfig = field(default_factory=DataConfig)
