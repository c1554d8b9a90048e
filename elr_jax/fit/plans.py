"""Models with a slice, a mesh, a recipe and a serving batch that `make fit` tells of, by name."""

from dataclasses import dataclass, field, replace
from typing import Any

from elr_jax import presets
from elr_jax.config import ModelConfig, Remat, Runtime
from elr_jax.depth import DepthLaw, PerExample
from elr_jax.errors import ElrError
from elr_jax.topologies import parse_topology
from elr_jax.train.optim import OptimConfig
from elr_jax.train.settings import Recipe
from pallas_kernels.contract import PLATFORMS

OWN: dict[str, Any] = {platform: name for name, platform in PLATFORMS.items()}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model on a slice of chips: how it is trained there and how it is served."""

    name: str
    """The model's, in `presets`."""
    model: ModelConfig
    topology: str
    mesh: str
    depth: DepthLaw
    batch_size: int
    seq_len: int = 4096
    microbatches: int = 4
    remat: Remat = "layer"
    gather_core: bool = True
    """`Runtime.gather_core`: False where a chip can't hold the core and its gradient whole."""
    kernels: bool = False
    """Whether ops are the slice's own kernels; else what a run takes that names none."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(optimizer="adamw"))
    serving_mesh: str
    prompts: int
    """That are read at once, each as long as the context."""
    requests: int
    """Of a decode step."""
    context: int = 8192

    @property
    def recipe(self) -> Recipe:
        """Of the training run, as long as any."""
        return Recipe(
            model=self.model,
            depth=self.depth,
            optim=self.optim,
            steps=10_000,
            batch_size=self.batch_size,
            microbatches=self.microbatches,
        )

    @property
    def runtime(self) -> Runtime:
        """Activations in bfloat16."""
        form = OWN[parse_topology(self.topology).platform] if self.kernels else "auto"
        return Runtime(dtype="bfloat16", remat=self.remat, gather_core=self.gather_core, kernels=form)


GPT = Plan(
    name="gpt_half_billion",
    model=presets.gpt_half_billion(),
    topology="v5e:2x4",
    mesh="fsdp=8",
    depth=PerExample(max_loops=5, forced=0.15),
    optim=OptimConfig(optimizer="muon"),
    batch_size=128,
    seq_len=2048,
    microbatches=16,
    serving_mesh="data=8",
    prompts=8,
    requests=64,
    context=2048,
)
DORY = Plan(
    name="dory_4b",
    model=presets.dory_4b(),
    topology="v5e:8x8",
    mesh="fsdp=64",
    gather_core=False,
    depth=PerExample(max_loops=4, forced=0.1),
    batch_size=256,
    serving_mesh="data=16,tensor=4",
    prompts=16,
    requests=256,
)
KOI = replace(
    DORY,
    name="koi_4b",
    model=presets.koi_4b(),
    mesh="fsdp=16,tensor=4",
    microbatches=16,
    serving_mesh="data=8,tensor=8",
)
MIXTURE = Plan(
    name="elr_30b_a3b",
    model=presets.elr_30b_a3b(),
    topology="v5p:4x4x4",
    mesh="fsdp=8,expert=4,tensor=2",
    depth=DORY.depth,
    batch_size=256,
    microbatches=8,
    serving_mesh="data=8,expert=8",
    prompts=64,
    requests=256,
)
ON_V5P = {"topology": "v5p:2x2x4", "mesh": "fsdp=16", "gather_core": True}
PLANS = (
    GPT,
    DORY,
    replace(DORY, **ON_V5P, serving_mesh="data=4,tensor=4"),
    KOI,
    replace(KOI, **ON_V5P, microbatches=4, serving_mesh="data=2,tensor=8"),
    MIXTURE,
    replace(
        MIXTURE,
        topology="h200:1x1x8",
        mesh="expert=8",
        serving_mesh="expert=8",
        batch_size=64,
        prompts=8,
    ),
)


def find_plan(name: str, topology: str | None) -> Plan:
    """The plan of a model on a slice, or on its first one (None)."""
    of_model = [plan for plan in PLANS if plan.name == name]
    if not of_model:
        names = ", ".join(dict.fromkeys(plan.name for plan in PLANS))
        raise ElrError(f"preset={name!r} is unknown: choose one of {names}, or all")
    return next((plan for plan in of_model if plan.topology == topology), of_model[0])
