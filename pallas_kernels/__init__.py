"""Fused operations of the model, one folder each: plain JAX everywhere, kernels for TPU and GPU by name.

`api.py` is what the library calls, `reference.py` the mathematics spelled out, `xla.py` the form that runs everywhere,
`pallas_tpu.py` and `pallas_gpu.py` the kernels, `shapes.py` the sizes that tests and benchmarks share.
"""

import elr_jax as elr_jax  # it imports this package in turn, and loads whole only if it comes first
