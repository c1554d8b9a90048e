"""A row of the table: what the compiler says of one program on one slice, and what the chip's roofs allow."""

import datetime
import importlib.metadata
from dataclasses import dataclass, field, replace
from typing import Literal

from elr_jax.collectives import Collective
from elr_jax.fit.plans import Plan
from elr_jax.fit.programs import Compiled, DoesNotFit, Where, compile_serving, compile_training
from elr_jax.fit.roofline import Load, Times, mean_rounds, runs_of, sent_bytes, serving_load, times, training_load
from elr_jax.hardware import HARDWARE, Hardware
from elr_jax.sharding import make_mesh
from elr_jax.topologies import absent_devices, parse_topology

Program = Literal["train", "prefill", "decode"]
PACKAGES = {"tpu": ("jax", "libtpu"), "cuda": ("jax", "jax-cuda13-plugin")}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Bytes are of one chip."""

    preset: str
    program: Program
    topology: str
    mesh: str
    rows: int
    tokens: int
    """Of a row; of a decode step those in its cache."""
    microbatches: int
    remat: str
    gather_core: bool
    rounds: float
    """Of the core, on average: how often collectives count that run in a loop whose length only the run knows."""
    date: str
    versions: dict[str, str]
    quick: bool
    """Compiled with little effort, in a fraction of the time: more memory and more bytes exchanged than a run has."""
    kernels: bool = False
    """Whether attention and state updates were the slice's own kernels."""
    refusal: str | None = None
    """The compiler's, where it makes no program for want of memory; what follows is 0 then."""
    arguments: int = 0
    temporaries: int = 0
    total: int = 0
    collectives: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By kind: how often it runs, and bytes of its whole arrays in all."""
    load: Load = field(default_factory=Load)
    seconds: float = 0.0
    """What lowering and compiling took here."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What a table has one row of."""
        return self.preset, self.topology, self.program

    @property
    def chip(self) -> Hardware:
        """One chip's figures."""
        return HARDWARE[parse_topology(self.topology).chip]

    @property
    def fits(self) -> bool:
        """Whether a chip's memory holds it all."""
        return self.refusal is None and self.total <= self.chip.memory

    @property
    def times(self) -> Times:
        """Of the three roofs."""
        return times(self.load, self.chip)

    @property
    def mfu(self) -> tuple[float, float]:
        """Share of the peak that the model's own operations are, with no overlap and with a perfect one."""
        least = self.load.useful / self.chip.flops
        return least / self.times.in_turn, least / self.times.overlapped


def fit(plan: Plan, program: Program, *, quick: bool = False) -> Row:
    """Compile one program of a plan.

    Raises:
        ElrError: a slice that is unknown, or a mesh that is not one of it.
    """
    topology, training = parse_topology(plan.topology), program == "train"
    text = plan.mesh if training else plan.serving_mesh
    where = Where(topology, make_mesh(text, devices=absent_devices(topology)), quick)
    row = Row(
        preset=plan.name,
        program=program,
        topology=plan.topology,
        mesh=text,
        rows={"train": plan.batch_size, "prefill": plan.prompts, "decode": plan.requests}[program],
        tokens=plan.seq_len if training else plan.context,
        microbatches=plan.microbatches if training else 1,
        remat=plan.remat if training else "none",
        gather_core=plan.gather_core,
        kernels=plan.kernels,
        rounds=mean_rounds(plan.recipe) if training else plan.model.loop.max_loops,
        quick=quick,
        date=datetime.date.today().isoformat(),
        versions={name: importlib.metadata.version(name) for name in PACKAGES[topology.platform]},
    )
    try:
        compiled, load = _compile(plan, row, where)
    except DoesNotFit as error:
        return replace(row, refusal=str(error))
    return replace(
        row,
        arguments=compiled.arguments,
        temporaries=compiled.temporaries,
        total=compiled.total,
        collectives=by_kind(compiled.collectives, row.rounds),
        load=load,
        seconds=compiled.seconds,
    )


def _compile(plan: Plan, row: Row, where: Where) -> tuple[Compiled, Load]:
    runtime, mesh = plan.runtime, where.mesh
    if row.program == "train":
        compiled = compile_training(plan.recipe, runtime, seq_len=row.tokens, where=where)
        found = {"held": compiled.arguments, "sent": sent_bytes(compiled.collectives, row.rounds), "mesh": mesh}
        return compiled, training_load(plan.recipe, runtime, seq_len=row.tokens, rounds=row.rounds, **found)
    sizes = {"rows": row.rows, "context": row.tokens, "new": 1 if row.program == "decode" else row.tokens}
    compiled = compile_serving(plan.model, runtime, **sizes, where=where)
    found = {"held": compiled.arguments, "sent": sent_bytes(compiled.collectives, row.rounds), "mesh": mesh}
    return compiled, serving_load(plan.model, runtime, loops=plan.model.loop.max_loops, **sizes, **found)


def by_kind(found: list[Collective], rounds: float) -> dict[str, tuple[float, float]]:
    """Runs and bytes of each kind of collective."""
    summed: dict[str, tuple[float, float]] = {}
    for one in found:
        runs, bytes_ = summed.get(one.op, (0.0, 0.0))
        now = runs_of(one, rounds)
        summed[one.op] = runs + now, bytes_ + now * one.bytes
    return summed
