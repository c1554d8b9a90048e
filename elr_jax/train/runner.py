"""A training run from its first step, or from where it stopped, to its last checkpoint.

A launch reads the newest checkpoint of its folder, if there is one; batches and depths are functions of the step, so
nothing else has to be restored. The last step and SIGTERM save, once. Where several processes train together each runs
all of this on its own part of every batch, and the first alone writes and talks.

A conditioned model with a late switch starts without conditioning at one loop and is grafted between two steps. The
state after step n always fits `recipe.at(n)`, on disk as in memory.
"""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from elr_jax import flops
from elr_jax.config import ModelConfig, Runtime, from_dict, to_dict
from elr_jax.depth import LAW_UNIONS
from elr_jax.errors import ElrError
from elr_jax.parameters import Params
from elr_jax.train import checkpoint
from elr_jax.train.data import Dataset, batches, open_dataset
from elr_jax.train.evaluate import LoopResult, evaluate
from elr_jax.train.lock import only_run
from elr_jax.train.metrics import MetricsWriter
from elr_jax.train.optim import learning_rate
from elr_jax.train.placement import Placement, placement
from elr_jax.train.processes import start, stop_on_sigterm, tell
from elr_jax.train.settings import Launch, Recipe, TextRun
from elr_jax.train.step import (
    StepMetrics,
    TrainState,
    graft_state,
    init_state,
    optimizer_for,
    train_step,
)


def train_text(run: TextRun) -> list[LoopResult]:
    """Train on the run's text and return the final evaluation."""
    start(run.launch.processes)  # before the text is read, so that one who is alone hears of it soon
    training, validation = (open_dataset(run.data, split, seed=run.recipe.seed) for split in ("train", "validation"))
    return train(run.recipe, run.launch, training=training, validation=validation)


def train(recipe: Recipe, launch: Launch, *, training: Dataset, validation: Dataset) -> list[LoopResult]:
    """Train to the recipe's last step or to SIGTERM, and return the final evaluation (empty if SIGTERM came before).

    Raises:
        ElrError: a vocabulary that does not fit, a folder that another process trains in or whose checkpoint belongs to
            another recipe or other data, or a write that failed.
    """
    start(launch.processes)
    if training.vocab_size > recipe.model.vocab_size:
        raise ElrError(
            f"model.vocab_size={recipe.model.vocab_size} is smaller than the data's {training.vocab_size}: raise it"
        )
    meta = {"recipe": recipe.to_dict(), "data": training.settings, "versions": {"jax": jax.__version__}}
    place = placement(launch.mesh)
    with only_run(launch.out):
        return _train(recipe, launch, meta, place, training=training, validation=validation)


def _train(
    recipe: Recipe,
    launch: Launch,
    meta: checkpoint.Meta,
    place: Placement,
    *,
    training: Dataset,
    validation: Dataset,
) -> list[LoopResult]:
    rows = place.rows(recipe.batch_size)
    store = checkpoint.Checkpoints(checkpoint_folder(launch.out), keep=launch.keep)
    state = _start(recipe, store, meta, place)
    first = int(state.step)
    step = jit_step(recipe.at(first), launch.runtime, place)
    log = MetricsWriter(launch.out, total_steps=recipe.steps, resume_step=first, peak_flops=place.peak_flops(launch))
    score = partial(_evaluate, recipe=recipe, launch=launch, validation=validation, log=log, place=place)
    results: list[LoopResult] = []
    with log, place.in_use(), stop_on_sigterm() as stopped:
        reporter = _Reporter(recipe, training.seq_len, log)
        todo = batches(training, recipe.batch_size, start=first, rows=rows) if first < recipe.steps else ()
        for number, batch in enumerate(todo, start=first + 1):
            state, metrics = step(state, place.batch(batch, recipe.batch_size))
            reporter.report(number, metrics)
            if number == recipe.graft_step:
                state, step = _graft(state, recipe, place), jit_step(recipe, launch.runtime, place)
            last = stopped() or number >= recipe.steps
            if last or (launch.save_every and number % launch.save_every == 0):
                reporter.flush()  # else a kill now would lose the line of a step that is not run again
                store.save(number, state, meta | {"step": number})
            if number < recipe.steps and launch.eval_every and number % launch.eval_every == 0:
                score(number, state.params)
            if last:
                break
        reporter.flush()
        if int(state.step) == recipe.steps:
            results = score(recipe.steps, state.params)
    tell(f"checkpoints: {store.directory}   metrics: {Path(launch.out) / 'metrics.jsonl'}")
    return results


def load_params(out: str, *, step: int | None = None, mesh: Mesh | None = None) -> tuple[Params, ModelConfig]:
    """The parameters and config of the newest (or one) checkpoint of a run's folder, or of what `save_params` wrote.

    On a mesh each device reads its pieces alone.
    """
    folder = checkpoint_folder(out)
    abstract = lambda meta: Placement(mesh).params(_config(meta), meta.get("dtype", "float32"))
    restored = checkpoint.restore(folder, abstract, step=step, field="params")
    if restored is None:
        raise ElrError(f"{out} holds no checkpoint: train with --launch.out {out} first, or name another folder")
    params, meta = restored
    return params, _config(meta)


def save_params(out: str, params: Params, config: ModelConfig) -> None:
    """Write parameters that no run of this project has trained to a new folder, for `load_params`; all of one type."""
    dtypes = sorted({leaf.dtype.name for leaf in jax.tree.leaves(params)})
    if len(dtypes) > 1:
        raise ElrError(f"the parameters are {' and '.join(dtypes)}: convert them to one of these types")
    meta = {"model": to_dict(config), "dtype": dtypes[0]}
    checkpoint.Checkpoints(checkpoint_folder(out), keep=1).save(0, {"params": params}, meta)


def checkpoint_folder(out: str) -> Path:
    """Where a run's folder has its checkpoints."""
    return Path(out) / "checkpoints"


def _config(meta: checkpoint.Meta) -> ModelConfig:
    """Of the parameters that the metadata was saved with."""
    if "model" in meta:
        return from_dict(ModelConfig, meta["model"])
    return from_dict(Recipe, meta["recipe"], unions=LAW_UNIONS).at(meta.get("step", 0)).model


def jit_step(recipe: Recipe, runtime: Runtime, place: Placement) -> Any:
    """The program of one step, which takes its state's memory."""
    step = partial(train_step, recipe=recipe, optimizer=optimizer_for(recipe), runtime=runtime)
    return jax.jit(step, donate_argnames=("state",), out_shardings=(place.state(recipe), place.everywhere))


def lower_step(recipe: Recipe, runtime: Runtime, mesh: Mesh, *, seq_len: int) -> jax.stages.Lowered:
    """The step as a run on this mesh has it, from shapes alone; its devices need not exist."""
    place = Placement(mesh)
    with place.in_use():
        step = jit_step(recipe, runtime, place)
        return step.lower(place.abstract(recipe), place.abstract_batch(recipe.batch_size, seq_len))


def _graft(state: TrainState, recipe: Recipe, place: Placement) -> TrainState:
    model_, loops = recipe.model, recipe.model.loop.max_loops
    tell(f"conditioning joins after step {recipe.graft_step}: {flops.num_params(model_):,} parameters, {loops} loops")
    grafted = partial(graft_state, recipe=recipe, optimizer=optimizer_for(recipe))
    return jax.jit(grafted, donate_argnames=("state",), out_shardings=place.state(recipe))(state)


def _start(recipe: Recipe, store: checkpoint.Checkpoints, meta: checkpoint.Meta, place: Placement) -> TrainState:
    same = _same_run(store, meta)
    restored = store.restore(lambda saved: place.abstract(recipe.at(saved.get("step", 0)))) if same else None
    if restored is None:
        part = recipe.at(0)
        tell(f"{flops.num_params(part.model):,} parameters, {recipe.steps} steps of {recipe.batch_size} rows")
        return jax.jit(partial(init_state, part, optimizer_for(part)), out_shardings=place.state(part))()
    state, _ = restored
    tell(f"resuming after step {int(state.step)} of {recipe.steps}")
    return state


def _same_run(store: checkpoint.Checkpoints, meta: checkpoint.Meta) -> bool:
    saved = checkpoint.read_meta(store.directory)
    if saved is None:
        return False
    if "recipe" not in saved:
        raise ElrError(f"{store.directory} holds parameters that no run trained: start a new --launch.out directory")
    # a field that is younger than the checkpoint has its default there
    recipe = from_dict(Recipe, saved["recipe"], unions=LAW_UNIONS).to_dict()
    checkpoint.refuse_mismatch(recipe, meta["recipe"], what="the recipe")
    checkpoint.refuse_mismatch(saved["data"], meta["data"], what="the data")
    return True


def _evaluate(
    step: int,
    params: Params,
    *,
    recipe: Recipe,
    launch: Launch,
    validation: Dataset,
    log: MetricsWriter,
    place: Placement,
) -> list[LoopResult]:
    size = min(recipe.batch_size, len(validation.examples))
    some = itertools.islice(batches(validation, size, rows=place.rows(size)), launch.eval_batches)
    results = evaluate(
        params,
        (place.batch(batch, size) for batch in some),
        config=recipe.at(step).model,
        runtime=launch.runtime,
        bytes_per_token=validation.bytes_per_token,
        key=jax.random.key(recipe.seed),
    )
    scores = {
        f"eval/{name}_{result.loops}": value
        for result in results
        for name, value in result._asdict().items()
        if name != "loops" and value is not None
    }
    log.write(step, scores)
    return results


class _Reporter:
    """Reports step t − 1 while step t runs, so that reading metrics never keeps the device waiting."""

    def __init__(self, recipe: Recipe, seq_len: int, log: MetricsWriter):
        self._recipe, self._seq_len, self._log = recipe, seq_len, log
        self._rate = learning_rate(recipe.optim, recipe.steps)
        self._pending: tuple[int, StepMetrics] | None = None

    def report(self, number: int, metrics: StepMetrics) -> None:
        """Note step `number` and write the one before."""
        self.flush()
        self._pending = number, metrics

    def flush(self) -> None:
        """Write the step noted last."""
        if self._pending is None:
            return
        number, metrics = self._pending
        self._pending = None
        metrics = jax.device_get(metrics)
        recipe, rounds = self._recipe.at(number - 1), float(metrics.executed_rounds)
        loops = range(1, recipe.model.loop.max_loops + 1)
        by_depth = {
            k: float(loss / weight)
            for k, loss, weight in zip(loops, metrics.by_depth.loss, metrics.by_depth.weight, strict=True)
            if weight
        }
        done = flops.train_flops(recipe.model, seq_len=self._seq_len, sequences=recipe.batch_size, rounds=rounds)
        tokens = recipe.batch_size * self._seq_len
        speed = self._log.progress(number, loss=float(metrics.loss), loss_by_depth=by_depth, tokens=tokens, flops=done)
        scalars = {
            "loss": float(metrics.loss),
            **{f"loss_{k}": value for k, value in by_depth.items()},
            "grad_norm": float(metrics.grad_norm),
            "learning_rate": float(jnp.asarray(self._rate(number - 1))),
            "executed_rounds": int(metrics.executed_rounds),
            "idle_rounds": int(metrics.idle_rounds),
            "useful_rounds": int(metrics.useful_rounds),
            "layer_passes": flops.layer_passes(recipe.model, rounds / recipe.batch_size),
            "train_flops": done,
            "skipped": int(metrics.skipped),
            **_routing_scalars(metrics),
            **speed,
        }
        self._log.write(number, scalars)


def _routing_scalars(metrics: StepMetrics) -> dict[str, float]:
    """A token's balance and z loss, and the most loaded expert's load over its mixture's mean."""
    routing = metrics.routing
    if routing is None:
        return {}
    weight = max(float(metrics.by_depth.weight.sum()), 1.0)
    load = np.asarray(routing.load)
    return {
        "balance_loss": float(routing.balance) / weight,
        "z_loss": float(routing.z) / weight,
        "largest_load": float((load.max(axis=1) / load.mean(axis=1)).max()),
    }
