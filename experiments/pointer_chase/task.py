"""Pointer chase: follow a random cyclic permutation a given number of times.

A row is the permutation as N edge tokens (x, f(x)), then Q questions (x, h), each one token and each scored at its own
position by f^h(x). Each hop is one look-up that needs the one before, so depth is what the task asks for.

The permutation is one cycle of length N. Under all permutations short cycles reward short cuts: x itself answers four
hops in 3/8 of the rows and f⁻¹(x), one look-up, answers five in 1/2 of them, and training settles there. On one cycle
no power of f below N comes back to x.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elr_jax import model
from elr_jax.config import ModelConfig
from elr_jax.parameters import Params
from elr_jax.train.data import Batch, Dataset, Example, batches, synthetic_dataset
from elr_jax.train.settings import Recipe
from elr_jax.train.token_store import Split
from elr_jax.typing import Array, Bool, Int32


@dataclass(frozen=True, kw_only=True)
class PointerChase:
    """Cycles of N = `nodes` values followed 1 … `max_hops` times.

    The edge from x to y is the token N·x + y, the question after h hops from x the token N² + N·(h − 1) + x.
    """

    nodes: int = 8
    max_hops: int = 5
    questions: int = 8
    """Questions asked of one permutation."""
    validation_examples: int = 512

    @property
    def settings(self) -> dict[str, Any]:
        """The fields."""
        return {"task": "pointer_chase"} | asdict(self)

    @property
    def vocab_size(self) -> int:
        """Edges and questions."""
        return self.nodes * (self.nodes + self.max_hops)

    def example(self, random: np.random.Generator) -> Example:
        """One row of nodes + questions tokens."""
        around = random.permutation(self.nodes)
        follow = np.empty_like(around)
        follow[around] = np.roll(around, -1)
        after = [np.arange(self.nodes)]
        for _ in range(self.max_hops):
            after.append(follow[after[-1]])
        hops, start = (
            random.integers(1, self.max_hops + 1, self.questions),
            random.integers(self.nodes, size=self.questions),
        )
        asked = self.nodes * (self.nodes + hops - 1) + start
        edges = self.nodes * np.arange(self.nodes) + follow
        answers = np.array(after)[hops, start]
        return {
            "tokens": np.concatenate([edges, asked]).astype(np.int32),
            "targets": np.concatenate([np.zeros_like(edges), answers]).astype(np.int32),
            "weights": np.repeat([0.0, 1.0], [self.nodes, self.questions]).astype(np.float32),
            "segment_ids": np.ones(self.nodes + self.questions, np.int32),
        }

    def open(self, split: Split, *, seed: int) -> Dataset:
        """Fresh rows without end for training, `validation_examples` of them for validation."""
        return synthetic_dataset(
            self.example,
            vocab_size=self.vocab_size,
            settings=self.settings,
            seed=seed,
            split=split,
            num_examples=None if split == "train" else self.validation_examples,
        )

    def measure(self, params: Params, recipe: Recipe) -> dict[str, Any]:
        """`accuracy_by_hops` [hops][loops] on the validation rows."""
        config = recipe.model
        rows = min(256, self.validation_examples)
        right, seen = np.zeros((self.max_hops, config.loop.max_loops)), np.zeros((self.max_hops, 1))
        for batch in batches(self.open("validation", seed=0), rows):
            hop = np.eye(self.max_hops)[batch.tokens[:, self.nodes :] // self.nodes - self.nodes]
            for k in range(config.loop.max_loops):
                found = _right(params, batch, jnp.int32(k + 1), config=config)[:, self.nodes :]
                right[:, k] += np.einsum("bqh,bq->h", hop, found)
            seen += hop.sum(axis=(0, 1))[:, None]
        return {"accuracy_by_hops": np.round(right / np.maximum(seen, 1), 4).tolist()}


@partial(jax.jit, static_argnames="config")
def _right(params: Params, batch: Batch, loops: Int32[Array, ""], *, config: ModelConfig) -> Bool[Array, "B T"]:
    logits = model.apply(params, batch.tokens, jnp.full(batch.tokens.shape[0], loops), config=config)
    return jnp.argmax(logits, axis=-1) == batch.targets
