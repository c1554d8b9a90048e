"""Batched generation from a cache, with a loop count, a sampler, a seed and stop tokens of each request.

completions = generate(params, [[5, 3], [7, 1, 4]], config=config, loops=[1, 4], max_new_tokens=16)

On a CPU, `working_copy(params, config=config)` in the parameters' place decodes faster, for the memory of a copy.
`start`, `encode`, `prefill` and `decode_step` are pure functions of a `DecodeState`, for an engine of one's own.
"""

from elr_jax.decode.generate import Completion, generate, working_copy
from elr_jax.decode.sampling import Sampling, filter_logits, sample
from elr_jax.decode.state import DecodeState, Requests, decode_step, encode, prefill, start

__all__ = [
    "Completion",
    "DecodeState",
    "Requests",
    "Sampling",
    "decode_step",
    "encode",
    "filter_logits",
    "generate",
    "prefill",
    "sample",
    "start",
    "working_copy",
]
