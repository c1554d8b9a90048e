"""Dory in a page of PyTorch, the opponent of `dory_vs_torch` where transformers has none: same shapes, same caches."""

# pyright: reportMissingImports=false
# torch is in the parity extra alone

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elr_jax.config import ModelConfig

Past = dict[tuple[int, int], tuple[Tensor, Tensor]]


def unit(x: Tensor) -> Tensor:
    """x / √(Σ x² + 1e-6) over the last axis, in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate(x: Tensor, base: float, start: int) -> Tensor:
    """Rotary positions of [B,N,T,H], halves as pairs."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device) / half)
    phase = torch.arange(start, start + x.shape[2], device=x.device)[:, None] * frequency
    cos, sin = phase.cos(), phase.sin()
    low, high = x.float().split(half, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


class PlainDory(torch.nn.Module):
    """The forward pass over tensors under their released names; `past` holds keys and values of every (layer, loop)."""

    def __init__(self, tensors: Mapping[str, Tensor], config: ModelConfig):
        super().__init__()
        self.config = config
        self.names = {name: name.replace(".", "_") for name in tensors}
        for name, tensor in tensors.items():
            self.register_parameter(self.names[name], torch.nn.Parameter(tensor))

    def tensor(self, name: str) -> Tensor:
        """A parameter by its released name."""
        return getattr(self, self.names[name])

    def forward(self, tokens: Tensor, loops: int, past: Past | None = None, *, last_only: bool = False) -> Tensor:
        """Logits of new tokens [B,T] after those in `past`, which gets theirs."""
        layers = range(len(self.config.layers))
        first, last = len(self.config.prelude), len(self.config.layers) - len(self.config.coda)
        x = F.embedding(tokens, self.tensor("backbone.embeddings.weight"))
        for i in layers[:first]:
            x = self.layer(x, i, 0, past)
        entry = x
        for loop in range(loops):
            x = unit(x + entry)
            for i in layers[first:last]:
                x = self.layer(x, i, loop, past)
        for i in layers[last:]:
            x = self.layer(x, i, 0, past)
        x = x[:, -1:] if last_only else x
        scale = self.tensor("lm_head.logit_scale").float() / self.scale
        return F.linear(x, self.tensor("lm_head.weight")).float() * scale

    @property
    def scale(self) -> float:
        """What the stored scales are divided by."""
        assert self.config.sphere is not None
        return self.config.sphere.init_std

    def layer(self, x: Tensor, i: int, loop: int, past: Past | None) -> Tensor:
        """A step on the sphere towards the sub-layer's output."""
        letter, name = self.config.layers[i], f"backbone.layers.{i}."
        weight = lambda part: self.tensor(f"{name}mixer.{part}")
        out = self.mlp(x, weight) if letter == "-" else self.attention(x, weight, letter, (i, loop), past)
        rate = self.tensor(name + ("mlp_alpha" if letter == "-" else "attn_alpha")).float()
        assert self.config.sphere is not None
        step = (rate * (self.config.sphere.rate_init / self.scale)).abs()
        start = unit(x.float())
        return unit(start + step * (unit(out.float()) - start)).to(x.dtype)

    def mlp(self, x: Tensor, weight: Any) -> Tensor:
        """SwiGLU with scales and an inner norm."""
        factor = self.config.d_model**0.5
        gate = F.linear(x, weight("gate_proj.weight")) * (weight("suv_gate") * factor)
        up = F.linear(x, weight("up_proj.weight")) * (weight("suv_up") * factor)
        return F.linear(unit(F.silu(gate) * up), weight("down_proj.weight"))

    def attention(self, x: Tensor, weight: Any, letter: str, key: tuple[int, int], past: Past | None) -> Tensor:
        """Unit-norm queries and keys, an output gate, and a norm over all heads."""
        attention = self.config.attention
        heads = lambda y: y.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        q, k, v, gate = (F.linear(x, weight(f"{part}_proj.weight")) for part in "qkvg")
        before = past.get(key) if past is not None else None
        start = before[0].shape[2] if before is not None else 0
        base = attention.base(letter)
        assert base is not None, "Dory has rotary positions"
        q, k = unit(rotate(heads(q), base, start)), unit(rotate(heads(k), base, start))
        q = q * heads((weight("sqk") * (attention.head_dim**0.5 / self.scale)).square()[None, None]).to(q.dtype)
        v = heads(v)
        if before is not None:
            k, v = torch.cat([before[0], k], 2), torch.cat([before[1], v], 2)
        if past is not None:
            past[key] = k, v
        out = F.scaled_dot_product_attention(q, k, v, self.mask(q, k, letter), enable_gqa=True)
        out = out.transpose(1, 2).flatten(2)
        gain = (weight("s_gate").float() / self.scale).square() * self.config.d_model**0.5
        out = out * torch.sigmoid(gate.float() * gain).to(out.dtype)
        return F.linear(unit(out), weight("o_proj.weight"))

    def mask(self, q: Tensor, k: Tensor, letter: str) -> Tensor:
        """Causal, and within the window of an `S` layer."""
        query = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[:, None]
        keys = torch.arange(k.shape[2], device=q.device)
        near = keys <= query
        return near & (keys > query - self.config.attention.window) if letter == "S" else near
