"""The platforms' own attention over a window, to be measured against: cuDNN's on GPU, splash attention on TPU."""

from typing import Any

import jax
import jax.numpy as jnp

from elr_jax.typing import Keys, Queries, SegmentIds


def cudnn(q: Queries, k: Keys, v: Keys, segment_ids: SegmentIds, *, window: int | None) -> Queries:
    """cuDNN's flash attention; it knows no segments and takes bfloat16 alone."""
    del segment_ids
    reach = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=reach, implementation="cudnn")


def splash(q: Queries, k: Keys, v: Keys, segment_ids: SegmentIds, *, window: int | None) -> Queries:
    """JAX's block-sparse attention for TPU."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    batch, length, heads, width = q.shape
    groups = k.shape[2]
    shape = (length, length)
    one = (
        splash_attention_mask.CausalMask(shape)
        if window is None
        else splash_attention_mask.LocalMask(shape, (window - 1, 0), 0)
    )
    mask = splash_attention_mask.MultiHeadMask([one] * (heads // groups))
    kernel = splash_attention_kernel.make_splash_mqa_single_device(mask)
    ids = splash_attention_kernel.SegmentIds(q=segment_ids, kv=segment_ids)
    rows = q.reshape(batch, length, groups, -1, width).transpose(0, 2, 3, 1, 4) * width**-0.5
    over_groups = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    out: Any = jax.vmap(over_groups)(rows.astype(q.dtype), jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), ids)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


OPPONENTS = {"tpu": ("splash", splash), "cuda": ("cuDNN", cudnn)}
