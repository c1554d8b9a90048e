"""Dory once more, in float64 NumPy on the released tensors: what both implementations are measured against.

One row at a time, plain loops, nothing shared with `elr_jax` but the config's fields, so that a fault there can't
repeat itself here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from elr_jax.config import ModelConfig, SphereConfig

VOCABULARY_BLOCK = 16_384  # rows of the head in float64 at a time: 0.3 GiB at width 2560

Array = np.ndarray
Memory = dict[int, list[list[tuple[Array, Array]]]]
"""Per attention layer, for every earlier call, the keys and values [T,K,H] that each of its rounds made."""


class Pass(NamedTuple):
    """Logits [T,V] and, in the order they were made, the named hidden states [T,D] between the layers."""

    logits: Float[Array, "T V"]
    rungs: dict[str, Float[Array, "T D"]]


def forward(
    tensors: Mapping[str, Any],
    tokens: Int[Array, "T"],
    loops: int | Sequence[int],
    *,
    config: ModelConfig,
    mode: str = "per_loop",
    calls: Sequence[int] | None = None,
    positions: Int[Array, "T"] | None = None,
) -> Pass:
    """The pass over a prompt cut into `calls` tokens each (None: one call), with one loop count or one a call.

    In round i a query reads, of tokens of earlier calls, the keys of their round i, or of their last where they ran
    fewer (`per_loop`), or always those of their last (`last_loop`); of its own call those of round i. `tensors` are
    those of the released layout, or anything that becomes a float64 array. [vLLM dory.py, transformers 5.24]
    """
    calls = [len(tokens)] if calls is None else list(calls)
    assert sum(calls) == len(tokens), f"calls {calls} don't add up to {len(tokens)} tokens"
    positions = np.arange(len(tokens)) if positions is None else positions
    counts = [loops] * len(calls) if isinstance(loops, int) else loops
    assert config.sphere is not None, "Dory is a model on the unit sphere"
    model = _Model(tensors, config, config.sphere, mode)
    passes = []
    for start, count, rounds in zip(np.cumsum([0, *calls[:-1]]), calls, counts, strict=True):
        here = slice(start, start + count)
        passes.append(model.call(tokens[here], positions[here], rounds))
    names = passes[0].rungs if len({*counts}) == 1 else {}
    rungs = {name: np.concatenate([one.rungs[name] for one in passes]) for name in names}
    return Pass(np.concatenate([one.logits for one in passes]), rungs)


@dataclass
class _Model:
    tensors: Mapping[str, Any]
    config: ModelConfig
    sphere: SphereConfig
    mode: str
    memory: Memory = field(default_factory=dict)
    read: int = 0

    def call(self, tokens: Array, positions: Array, loops: int) -> Pass:
        config, rungs = self.config, {}
        first, last = len(config.prelude), len(config.prelude + config.core)
        embedding = np.stack([self.embedding_row(token) for token in tokens])
        rungs["embedding"] = self.unit(embedding)
        h = rungs["embedding"] if self.sphere.embedding_norm else embedding

        def run(h: Array, layers: Iterable[int], prefix: str, i: int = 0) -> Array:
            for layer in layers:
                h = self.layer(layer, h, positions, i)
                rungs[f"{prefix}layers.{layer}"] = h
            return h

        for layer in range(len(config.layers)):
            self.memory.setdefault(layer, []).append([])
        h = run(h, range(first), "")
        entry = h
        for i in range(loops):
            h = self.unit(h + entry)
            rungs[f"loop {i + 1} entry"] = h
            h = self.unit(run(h, range(first, last), f"loop {i + 1} ", i))
        h = run(h, range(last, len(config.layers)), "")
        self.read += len(tokens)
        return Pass(self.logits(h), rungs)

    def layer(self, layer: int, h: Array, positions: Array, i: int) -> Array:
        """unit(ĥ + |rate·rate_init/std| ⊙ (unit(f(h)) − ĥ)) with ĥ = unit(h)."""
        sphere = self.sphere
        attention = self.config.layers[layer] != "-"
        out = self.attention(layer, h, positions, i) if attention else self.mlp(layer, h)
        name = "attn_alpha" if attention else "mlp_alpha"
        rate = np.abs(self.tensor(f"backbone.layers.{layer}.{name}") * sphere.rate_init / sphere.init_std)
        return self.unit(self.unit(h) + rate * (self.unit(out) - self.unit(h)))

    def attention(self, layer: int, h: Array, positions: Array, i: int) -> Array:
        shape, std = self.config.attention, self.sphere.init_std
        window = shape.window if self.config.layers[layer] == "S" else None
        base = shape.rope_base if window is None or shape.window_rope_base is None else shape.window_rope_base
        weight = self.weights(layer)
        heads = lambda name: (h @ weight(f"{name}_proj.weight").T).reshape(len(h), -1, shape.head_dim)
        q, k, v = heads("q"), self.unit(rope(heads("k"), positions, base)), heads("v")
        q = self.unit(rope(q, positions, base)) * (weight("sqk") * shape.head_dim**0.5 / std).reshape(q.shape[1:]) ** 2
        keys, values = self.remember(layer, i, k, v)
        out = np.zeros_like(q)
        for t in range(len(q)):
            seen = slice(0 if window is None else max(0, self.read + t + 1 - window), self.read + t + 1)
            for head in range(shape.num_heads):
                group = head // (shape.num_heads // shape.num_kv_heads)
                out[t, head] = softmax(keys[seen, group] @ q[t, head] / shape.head_dim**0.5) @ values[seen, group]
        start = self.sphere.gate_init or self.config.d_model**0.5
        logits = (h @ weight("g_proj.weight").T) * start * (weight("s_gate") / std) ** 2
        return self.unit(out.reshape(len(h), -1) * sigmoid(logits)) @ weight("o_proj.weight").T

    def remember(self, layer: int, i: int, k: Array, v: Array) -> tuple[Array, Array]:
        """All keys and values [S,K,H] a query of round i sees, and keep this call's own."""
        *earlier, own = self.memory[layer]
        own.append((k, v))
        past = [rounds[-1 if self.mode == "last_loop" else min(i, len(rounds) - 1)] for rounds in earlier]
        keys, values = zip(*past, (k, v), strict=True)
        return np.concatenate(keys), np.concatenate(values)

    def mlp(self, layer: int, h: Array) -> Array:
        weight, width = self.weights(layer), self.config.d_model**0.5
        gate = h @ weight("gate_proj.weight").T * weight("suv_gate") * width
        up = h @ weight("up_proj.weight").T * weight("suv_up") * width
        return self.unit(gate * sigmoid(gate) * up) @ weight("down_proj.weight").T

    def logits(self, h: Array) -> Array:
        name = "backbone.embeddings.weight" if self.config.tie_embeddings else "lm_head.weight"
        head, count = self.tensors[name], self.config.vocab_size
        blocks = [h @ float64(head[at : at + VOCABULARY_BLOCK]).T for at in range(0, count, VOCABULARY_BLOCK)]
        return np.concatenate(blocks, axis=1) * self.tensor("lm_head.logit_scale") / self.sphere.init_std

    def embedding_row(self, token: int) -> Array:
        return float64(self.tensors["backbone.embeddings.weight"][int(token)])

    def tensor(self, name: str) -> Array:
        return float64(self.tensors[name])

    def weights(self, layer: int) -> Callable[[str], Array]:
        return lambda name: self.tensor(f"backbone.layers.{layer}.mixer.{name}")

    def unit(self, x: Array) -> Array:
        return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + self.config.norm_eps)


def float64(tensor: Any) -> Array:
    """A NumPy or PyTorch tensor in float64 (NumPy has no bfloat16 of its own to go through)."""
    return np.asarray(tensor.double() if hasattr(tensor, "double") else tensor, dtype=np.float64)


def rope(x: Float[Array, "T N H"], positions: Array, base: float | None) -> Float[Array, "T N H"]:
    """Turn the pairs (x_j, x_{j+H/2}) by position · base^(−2j/H)."""
    if base is None:
        return x
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * base ** (-np.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def softmax(x: Array) -> Array:
    """exp(x) / Σ exp(x)."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(−x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))
