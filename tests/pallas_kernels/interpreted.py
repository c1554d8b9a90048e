"""TPU kernels on the CPU: two cores, races looked for, fresh memory full of NaN; and a reference's gradients."""

from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from pallas_kernels.interpret import tpu_interpreter


@contextmanager
def interpreted():
    """Kernels inside are interpreted; a race fails the test (JAX 0.12 raises by itself)."""
    with tpu_interpreter(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2):
        yield
    races = getattr(interpret_pallas_call, "races", None)
    assert races is None or not races.races_found, "two steps of a kernel's grid touch the same memory"


def pulled(function, inputs, cotangent):
    """The value and the gradients of all inputs, in one program."""

    @jax.jit
    def run(inputs, cotangent):
        out, pull = jax.vjp(function, *inputs)
        return out, *pull(cotangent)

    return run(inputs, cotangent)


def assert_near(actual, expected, dtype):
    """Every array within rounding of its own size; bfloat16 rounds inner factors too."""
    for one, other in zip(actual, expected, strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        assert one.shape == other.shape and np.isfinite(one).all()
        # what cancels to zero (a query's gradient where it sees one key) keeps the rounding of summands of order one:
        # in float32 2e-7 where two sums of eight are made in different orders
        size = max(np.abs(other).max(initial=0), 2.0 if dtype == "bfloat16" else 0.05)
        np.testing.assert_allclose(one / size, other / size, atol=2e-2 if dtype == "bfloat16" else 2e-5, rtol=0)


def normal(seed, *shape, dtype="float32"):
    """Draws of a key of its own."""
    return jax.random.normal(jax.random.key(seed), shape).astype(jnp.dtype(dtype))


def check(op, reference, inputs, dtype, interpreter=interpreted, kernels="pallas_tpu", **options):
    """Value and gradients of an op's kernels, interpreted, and of its XLA form against the reference."""
    cotangent = normal(99, *inputs[0].shape, dtype=dtype)
    expected = pulled(partial(reference, **options), inputs, cotangent)
    assert_near(pulled(partial(op, **options), inputs, cotangent), expected, dtype)
    with interpreter():
        found = pulled(partial(op, **options, implementation=kernels), inputs, cotangent)
    assert_near(found, expected, dtype)
    return found
