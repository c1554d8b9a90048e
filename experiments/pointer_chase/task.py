"""Pointer chase: follow a random permutation a given number of times.

A row is the table f(0) … f(N−1), the hop count h and the start x; the answer f^h(x) is scored at the last position.
Each hop is one look-up that needs the one before, so depth is what the task asks for. Answering x itself is right
whenever x lies on a cycle whose length divides h: in 1/N of the rows for one hop, in 3/N for four.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elr_jax import model
from elr_jax.config import ModelConfig
from elr_jax.train.data import Batch, Dataset, Example, batches, synthetic_dataset
from elr_jax.train.token_store import Split
from elr_jax.typing import Array, Bool, Int32


@dataclass(frozen=True, kw_only=True)
class PointerChase:
    """Permutations of `nodes` values followed 1 … `max_hops` times; a hop count h is the token nodes + h − 1."""

    nodes: int = 8
    max_hops: int = 5
    validation_examples: int = 2560

    @property
    def settings(self) -> dict[str, Any]:
        """The fields."""
        return {"task": "pointer_chase"} | asdict(self)

    def example(self, random: np.random.Generator) -> Example:
        """One row of nodes + 2 tokens."""
        table = random.permutation(self.nodes)
        hops, start = 1 + random.integers(self.max_hops), random.integers(self.nodes)
        answer = start
        for _ in range(hops):
            answer = table[answer]
        tokens = np.array([*table, self.nodes + hops - 1, start], np.int32)
        last = np.arange(tokens.size) == tokens.size - 1
        return {
            "tokens": tokens,
            "targets": np.where(last, answer, 0).astype(np.int32),
            "weights": last.astype(np.float32),
            "segment_ids": np.ones(tokens.size, np.int32),
        }

    def open(self, split: Split, *, seed: int) -> Dataset:
        """Fresh rows without end for training, `validation_examples` of them for validation."""
        return synthetic_dataset(
            self.example,
            vocab_size=self.nodes + self.max_hops,
            settings=self.settings,
            seed=seed,
            split=split,
            num_examples=None if split == "train" else self.validation_examples,
        )

    def measure(self, params: model.Params, config: ModelConfig) -> dict[str, Any]:
        """`accuracy_by_hops` [hops][loops] on the validation rows."""
        rows = min(256, self.validation_examples)
        right, seen = np.zeros((self.max_hops, config.loop.max_loops)), np.zeros((self.max_hops, 1))
        for batch in batches(self.open("validation", seed=0), rows):
            hop = np.eye(self.max_hops)[batch.tokens[:, self.nodes] - self.nodes]
            found = [_right(params, batch, jnp.int32(k), config=config) for k in range(1, config.loop.max_loops + 1)]
            right += hop.T @ np.stack(found, axis=1)
            seen += hop.sum(axis=0)[:, None]
        return {"accuracy_by_hops": np.round(right / np.maximum(seen, 1), 4).tolist()}


@partial(jax.jit, static_argnames="config")
def _right(params: model.Params, batch: Batch, loops: Int32[Array, ""], *, config: ModelConfig) -> Bool[Array, "B"]:
    logits = model.apply(params, batch.tokens, jnp.full(batch.tokens.shape[0], loops), config=config)
    return jnp.argmax(logits[:, -1], axis=-1) == batch.targets[:, -1]
