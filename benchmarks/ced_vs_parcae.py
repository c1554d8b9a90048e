"""A training step at stochastic depth: Parcae's authors' code against this project, on the same weights and draws.

    python -m benchmarks.ced_vs_parcae --parcae DIR      DIR: a checkout of github.com/sandyresearch/parcae
    python -m benchmarks.ced_vs_parcae                   this side alone, and the rounds both would run

Each row of a batch draws max(1, Poisson(8)) rounds, of which the last 4 carry gradients. Theirs runs every row for the
most rounds without gradients that any drew, then for the most with, and keeps a row's state once it is done. Here rows
are sorted by depth and cut into microbatches, each as deep as its deepest row. Both take the forward and the backward
pass in float32 and an AdamW step, in one process and in turns; the losses of the first step must agree. It needs torch
(`pip install 'elr-jax[parity]'`) and takes some ten minutes on two cores.
"""

import dataclasses
import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.report import CONSOLE, tell_machine, tell_table, write_json
from benchmarks.timing import machine, race, require_torch
from benchmarks.training import Turn, random_batch, rounds, steps_of
from checkpoints_convert import load_parcae
from checkpoints_convert.parcae import parcae_config
from elr_jax import parameters
from elr_jax.config import ModelConfig, Runtime
from elr_jax.depth import Fixed, PoissonDepth
from elr_jax.errors import ElrError, one_line_errors
from elr_jax.train.data import Batch
from elr_jax.train.optim import OptimConfig
from elr_jax.train.settings import Recipe
from elr_jax.typing import Depth, PRNGKeyArray

TOLERANCE = 1e-4
"""Relative difference of the first step's mean losses; both are sums in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CedVsParcae:
    """Sizes of both sides."""

    parcae: Path | None = None
    """A checkout of the authors' repository; None runs this project's side alone."""
    d_model: int = 256
    heads: int = 4
    blocks: int = 2
    """Before, in and after the loop."""
    vocab_size: int = 4096
    seq_len: int = 128
    batch_size: int = 32
    microbatches: int = 8
    mean_rounds: int = 8
    backprop_rounds: int = 4
    max_loops: int = 24
    steps: int = 2
    """Steps of one turn, each with its own draw."""
    repeats: int = 3
    """Turns of each side."""
    runtime: Runtime = dataclasses.field(default_factory=Runtime)
    seed: int = 0
    json: Path | None = None
    """File to write the result to; None writes nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replayed(Fixed):
    """The depths of a table [steps, B], whatever the key."""

    table: tuple[tuple[int, ...], ...]

    def sample(self, key: PRNGKeyArray, step: Any, rows: Any, *, batch_size: int, total_steps: int) -> Depth:
        """The step's line."""
        return jnp.array(self.table, jnp.int32)[step % len(self.table)]


def main(settings: CedVsParcae) -> dict[str, Any]:
    """Race both sides, or time this one, and print the rounds and rates."""
    result: dict[str, Any] = {"machine": machine(), "settings": dataclasses.asdict(settings)}
    tell_machine(result["machine"])
    peer = None if settings.parcae is None else Peer(settings, settings.parcae)
    depths = drawn(settings) if peer is None else peer.depths()
    with tempfile.TemporaryDirectory() as folder:
        if peer is None:
            config = parcae_config(peer_config(settings), name="the settings", max_loops=settings.max_loops)
            params = jax.jit(partial(parameters.init, config=config))(jax.random.key(settings.seed))
        else:
            peer.save(Path(folder))
            params, config = load_parcae(folder, max_loops=settings.max_loops)
    ours = our_steps(settings, config, params, depths)
    contestants: dict[str, Callable[[], Any]] = {"elr_jax": ours}
    metrics = ours()[1]
    if peer is not None:
        losses = float(metrics[0].loss), peer.first_loss()
        if abs(losses[0] - losses[1]) > TOLERANCE * abs(losses[1]):
            raise ElrError(f"the first step's losses are {losses[0]:.6f} here and {losses[1]:.6f} there: not one model")
        contestants["parcae"] = peer.turn
    times = race(contestants, repeats=settings.repeats)
    tokens = settings.steps * settings.batch_size * settings.seq_len
    run = {
        "elr_jax": rounds(metrics, rows=settings.batch_size)[0],
        "parcae": theirs(depths, settings.backprop_rounds),
    }
    result["rows"] = [
        {
            "side": name,
            "rounds a row drawn": float(depths.mean()),
            "rounds a row run": run[name],
            "tokens / s": tokens / times[name].median if name in times else float("nan"),
            "ratio": times["parcae"].median / times[name].median if peer else float("nan"),
        }
        for name in ("elr_jax", "parcae")
    ]
    tell_table(f"A training step of {settings.batch_size} rows at Poisson({settings.mean_rounds})", result["rows"])
    if peer is None:
        CONSOLE.print("the other side was not run: give --parcae a checkout of github.com/sandyresearch/parcae")
    write_json(settings.json, json.loads(json.dumps(result, default=str)))
    return result


def theirs(depths: np.ndarray, backprop: int) -> float:
    """Rounds a row that the authors' batch runs: the most without gradients, then the most with."""
    with_gradient = np.minimum(depths, backprop)
    return float(np.mean((depths - with_gradient).max(axis=1) + with_gradient.max(axis=1)))


def drawn(settings: CedVsParcae) -> np.ndarray:
    """Depths [steps, B] of this project's own law."""
    law = PoissonDepth(rate=settings.mean_rounds, max_loops=settings.max_loops)
    rows = jnp.arange(settings.batch_size)
    sizes = {"batch_size": settings.batch_size, "total_steps": settings.steps}
    key = jax.random.key(settings.seed)
    return np.stack([law.sample(key, jnp.int32(step), rows, **sizes) for step in range(settings.steps)])


def our_steps(settings: CedVsParcae, config: ModelConfig, params: Any, depths: np.ndarray) -> Turn:
    """Steps at these depths, on the tokens of both sides."""
    recipe = Recipe(
        model=config,
        depth=Replayed(loops=int(depths.max()), table=tuple(map(tuple, depths.tolist()))),
        optim=OptimConfig(optimizer="adamw", warmup_steps=1),
        batch_size=settings.batch_size,
        microbatches=settings.microbatches,
        backprop_loops=settings.backprop_rounds,
    )
    return steps_of(recipe, batch_of(settings), steps=settings.steps, runtime=settings.runtime, params=params)


def batch_of(settings: CedVsParcae) -> Batch:
    """The tokens of both sides."""
    return random_batch(settings.batch_size, settings.seq_len, vocab_size=settings.vocab_size, seed=settings.seed)


def peer_config(settings: CedVsParcae) -> dict[str, Any]:
    """The sizes in the authors' fields; the initial state is zero, so that both sides start alike."""
    d = settings.d_model
    return {
        "block_size": settings.seq_len,
        "vocab_size": settings.vocab_size,
        "padding_multiple": 64,
        "n_embd": d,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "intermediate_size": 4 * d,
        "tie_embeddings": True,
        "block_class_name": "TransformerPreNormBlock",
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "BaseMLP",
        "nonlin_name": "ReLU2",
        "attn_impl": "sdpa",
        "qk_norm": True,
        "prelude_norm": True,
        "init_strategy": "scaled",
        "state_init": "zero",
        "recurrent_embedding_dimension": d,
        "recurrent_intermediation_embedding_dimension": 4 * d,
        "n_layers_in_recurrent_block": settings.blocks,
        "n_layers_in_prelude": settings.blocks,
        "n_layers_in_coda": settings.blocks,
        "mean_recurrence": settings.mean_rounds,
        "mean_backprop_depth": settings.backprop_rounds,
        "sampling_scheme": "poisson-truncated-full",
        "recurrent_iteration_method": "per-sequence",
    }


class Peer:
    """The authors' model in PyTorch, as their training script would step it without compiling."""

    def __init__(self, settings: CedVsParcae, checkout: Path):
        self.settings, self.torch = settings, require_torch()
        if not (checkout / "parcae_lm").is_dir():
            raise ElrError(f"--parcae {checkout} has no folder parcae_lm: name a checkout of the authors' repository")
        sys.path.insert(0, str(checkout))
        try:
            config = importlib.import_module("parcae_lm.models.parcae.config").ParcaeConfig(**peer_config(settings))
        except ImportError as error:
            raise ElrError(f"{checkout} can't be imported ({error}): install what it needs") from error
        self.torch.manual_seed(settings.seed)
        self.torch.set_num_threads(int(machine()["cores"]))
        self.model = config.construct_model().train()
        self.start = {name: leaf.clone() for name, leaf in self.model.state_dict().items()}
        batch = batch_of(settings)
        self.inputs, self.labels = (
            self.torch.from_numpy(np.array(tokens)).long() for tokens in (batch.tokens, batch.targets)
        )

    def save(self, folder: Path) -> None:
        """Weights and config as the authors' `save_pretrained` leaves them."""
        self.torch.save(self.model.state_dict(), folder / "model.pt")
        (folder / "config.json").write_text(json.dumps(peer_config(self.settings)), encoding="utf-8")

    def depths(self) -> np.ndarray:
        """What the authors' sampler draws [steps, B], cut at the most this project's side is compiled for."""
        found = []
        for step in range(self.settings.steps):
            self.model.step = step
            before, with_gradient = self.model._sample_batch_depths(self.settings.batch_size)
            found.append((before + with_gradient).numpy())
        depths = np.stack(found)
        if depths.max() > self.settings.max_loops:
            raise ElrError(f"a row draws {depths.max()} rounds: raise --max-loops above {self.settings.max_loops}")
        return depths

    def first_loss(self) -> float:
        """Mean nats of the first step."""
        self.model.load_state_dict(self.start)
        self.model.step = 0
        with self.torch.no_grad():
            return float(self.model(self.inputs, labels=self.labels)["loss"])

    def turn(self) -> None:
        """Steps from the same state every time."""
        self.model.load_state_dict(self.start)
        optimizer = self.torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        for step in range(self.settings.steps):
            self.model.step = step
            self.model(self.inputs, labels=self.labels)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(CedVsParcae, description=__doc__))
