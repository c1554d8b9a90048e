"""The adaptive delta's and the sphere step's TPU kernels, interpreted, and their XLA forms against plain formulas."""

from functools import partial

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import check, normal

from elr_jax.errors import ElrError
from pallas_kernels import gated_update, sphere_step
from pallas_kernels.gated_update import reference as gated_reference
from pallas_kernels.interpret import plain_interpreter
from pallas_kernels.sphere_step import reference as sphere_reference

EPS = 1e-5


def run_gated(batch, length, width, dtype, **how):
    hidden = [normal(j, batch, length, width, dtype=dtype) for j in (0, 1)]
    weight = (normal(2, width, width) / width**0.5).astype(dtype)
    inputs = (*hidden, weight, normal(3, width), normal(4, width))
    active = jnp.arange(batch) % 2 == 0
    op, reference = (
        lambda *x, f=f, **kind: f(*x, active, eps=EPS, **kind)
        for f in (gated_update.gated_update, gated_reference.gated_update)
    )
    check(op, reference, inputs, dtype, **how)


def run_sphere(batch, length, width, dtype, **how):
    inputs = (*(normal(j, batch, length, width, dtype=dtype) for j in (0, 1)), normal(2, width))
    op, reference = (partial(f.sphere_step, eps=EPS) for f in (sphere_step, sphere_reference))
    check(op, reference, inputs, dtype, **how)


def test_the_adaptive_delta():
    run_gated(3, 5, 128, "float32", interpreter=plain_interpreter)


def test_the_sphere_step():
    run_sphere(3, 5, 48, "float32", interpreter=plain_interpreter)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_gated, run_sphere])
@pytest.mark.parametrize("sizes", [(2, 700, 256, "float32"), (1, 1, 384, "bfloat16"), (1, 30, 1280, "bfloat16")])
def test_blocks_of_rows_and_columns(run, sizes):
    """More rows than a block, a last block that is cut, several blocks of columns and of the product's inner axis."""
    run(*sizes)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_gated, run_sphere])
@pytest.mark.parametrize("sizes", [(2, 70, 256, "float32"), (3, 5, 384, "bfloat16")])
def test_gpu_kernels(run, sizes):
    run(*sizes, interpreter=plain_interpreter, kernels="pallas_gpu")


@pytest.mark.slow
@settings(max_examples=5)
@given(
    st.integers(1, 4), st.integers(1, 40), st.sampled_from([128, 256, 640]), st.sampled_from(["float32", "bfloat16"])
)
def test_any_shape(batch, length, width, dtype):
    run_gated(batch, length, width, dtype)
    run_sphere(batch, length, width - 8, dtype)


@pytest.mark.parametrize(
    "width, run, reason",
    [(100, run_gated, "the width 100 is no multiple of 128"), (8200, run_sphere, "the width 8200 is above 8192")],
)
def test_a_kernel_that_cannot_run_says_why(width, run, reason):
    hidden, vector = jnp.ones((1, 1, width)), jnp.ones(width)
    with pytest.raises(ElrError, match=reason):
        if run is run_gated:
            weight, active = jnp.ones((width, width)), jnp.ones(1, bool)
            gated_update.gated_update(
                hidden, hidden, weight, vector, vector, active, eps=EPS, implementation="pallas_tpu"
            )
        else:
            sphere_step.sphere_step(hidden, hidden, vector, eps=EPS, implementation="pallas_tpu")
