"""How an op chooses its form: by the caller's name for it, or by the platform the program is made for.

A named form runs or raises an `ElrError`: at once for shapes and types it has no kernel for, on lowering for a platform
that is not its own. Without a name an op always runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from elr_jax.errors import ElrError
from elr_jax.sharding import cut_by, on_own_pieces
from elr_jax.typing import Array
from pallas_kernels.interpret import interpreting

Implementation = Literal["xla", "pallas_tpu", "pallas_gpu"]
PLATFORMS = {"pallas_tpu": "tpu", "pallas_gpu": "cuda"}
HIDDEN = ("batch", "sequence", None)
"""Logical axes of a state [B,T,D]."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The form of an op, static under jit; `named` says that the caller asked for it."""

    op: str
    implementation: Implementation
    named: bool


def choose(
    op: str,
    implementation: Implementation | None,
    *,
    best: Mapping[str, Implementation],
    refusal: Callable[[Implementation], str | None],
) -> Choice:
    """The form to run: the named one, or the best one known for the target platform.

    `refusal` gives the reason why a kernel can't run on the operands at hand, or None.

    Raises:
        ElrError: an unknown name, or a kernel that can't run.
    """
    refused = lambda name: refusal(name) or _explicit()
    if implementation is None:
        found = best.get(target_platform(), "xla")
        able = found != "xla" and not _unknown_cut() and refused(found) is None
        return Choice(op=op, implementation=found if able else "xla", named=False)
    if implementation not in get_args(Implementation):
        names = ", ".join(get_args(Implementation))
        raise ElrError(f"{op}(implementation={implementation!r}) is unknown: choose one of {names}, or None")
    reason = None if implementation == "xla" else refused(implementation)
    if reason:
        raise ElrError(f"{op}(implementation={implementation!r}) can't run: {reason}; None picks a form that can")
    return Choice(op=op, implementation=implementation, named=True)


def kernels_of(package: str | None, implementation: Implementation) -> Any:
    """The module of an op's package with its kernels of one kind, loaded when it is first asked for."""
    return import_module(f"{package}.{implementation}")


def target_platform() -> str:
    """The platform of the mesh in use (`jax.set_mesh`), which may have no devices here, else of the default device."""
    default: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    device = jax.sharding.get_abstract_mesh().abstract_device or default
    name = getattr(device, "platform", device) or jax.default_backend()
    return "cuda" if name == "gpu" else name


def _unknown_cut() -> bool:
    """Whether arrays may be cut unseen: on several devices and no mesh in use, XLA would gather them for a kernel."""
    return jax.sharding.get_abstract_mesh().empty and jax.device_count() > 1


def _explicit() -> str | None:
    """Why no kernel can be had where the types of arrays say how they are cut, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    cut = [name for name, kind in kinds if kind == jax.sharding.AxisType.Explicit and mesh.shape[name] > 1]
    return f"the mesh axis {cut[0]!r} is Explicit (jax.sharding.auto_axes makes it automatic)" if cut else None


def run(
    choice: Choice,
    kernel: Callable[..., Any],
    xla: Callable[..., Any],
    *operands: Any,
    axes: Sequence[Sequence[str | None]],
    like: Any,
) -> Any:
    """The kernel's result where its platform is; elsewhere the XLA form's, unless the kernel was asked for by name.

    On a mesh each device runs it on its own pieces: `axes` and `like` are those of `on_own_pieces`. To be called where
    no derivative is taken, inside the op's own rules.
    """

    def here(*pieces: Any) -> Any:
        if choice.named:
            first = _only_on.bind(pieces[0], op=choice.op, implementation=choice.implementation)
            return kernel(first, *pieces[1:])
        return jax.lax.platform_dependent(*pieces, default=xla, **{PLATFORMS[choice.implementation]: kernel})

    return on_own_pieces(here, operands, axes, like)


def _refuse_elsewhere(context: mlir.LoweringRuleContext, x: Any, *, op: str, implementation: str) -> Any:
    platform = PLATFORMS[implementation]
    for found in context.module_context.platforms:
        if found != platform and not interpreting():
            raise ElrError(
                f"{op}(implementation={implementation!r}) runs on {platform} and this program is for {found}: "
                "choose 'xla', or None"
            )
    return [x]


_only_on = Primitive("only_on")
"""The identity; lowering it for another platform than the kernel's raises. Interpreted kernels run anywhere."""
_only_on.def_impl(lambda x, **_: jax.jit(lambda y: _only_on.bind(y, **_))(x))
_only_on.def_abstract_eval(lambda x, **_: x)
batching.primitive_batchers[_only_on] = lambda xs, axes, **how: (_only_on.bind(xs[0], **how), axes[0])
mlir.register_lowering(_only_on, _refuse_elsewhere)


def cut_rows() -> str | None:
    """Why a kernel that needs a row's every token can't run, or None."""
    if cut_by("sequence") > 1:
        return "the mesh cuts rows along its sequence axis, and the kernel needs the whole row"
    return None


def narrow(*arrays: Array) -> str | None:
    """Why kernels can't take the arrays' types, or None: they are float32 or bfloat16, and all alike."""
    types = sorted({x.dtype.name for x in arrays})
    if types in (["float32"], ["bfloat16"]):
        return None
    return f"its operands are {' and '.join(types)}, and kernels take float32 or bfloat16"
