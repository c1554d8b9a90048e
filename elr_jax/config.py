"""What a checkpoint is (`ModelConfig`) and how this process runs it (`Runtime`): frozen, static under jit.

A model is three strings of layer letters and a loop rule. The letters are those of `LETTERS`; the loop rule's fields
are the columns of the table in ARCHITECTURE.md.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import cattrs
from cattrs.strategies import configure_tagged_union

from elr_jax.errors import ElrError

LETTERS = {
    "*": "full attention",
    "S": "sliding-window attention",
    "V": "full attention with value embeddings",
    "G": "window attention that also makes global keys, and sees them",
    "R": "window attention that also sees the global keys of the nearest G above",
    "D": "gated delta product",
    "-": "MLP",
    "E": "mixture of experts",
}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention: N query heads share K key-value heads of width H."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 1024
    """Keys that an `S`, `G` or `R` layer sees of its own, the query's included."""
    rope_base: float | None = 10_000.0
    """Base of the rotary angles; None leaves positions out."""
    window_rope_base: float | None = None
    """Base of the `S` layers' angles; None: the same."""
    qk_norm: bool = False
    """RMS-normalise queries and keys (no parameters) after the rotation."""
    qk_norm_eps: float | None = None
    """Its offset under the root; None: the model's `norm_eps`."""
    value_gate_inputs: int = 32
    """Inputs that the gate of a `V` layer's value embedding reads, the first ones."""

    def __post_init__(self):
        for name in ("num_heads", "num_kv_heads", "head_dim", "window", "value_gate_inputs"):
            _positive(f"attention.{name}", getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ElrError(
                f"attention.num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                "every key-value head serves the same number of query heads"
            )
        if self.rope_base is None and self.window_rope_base is not None:
            raise ElrError(
                f"attention.window_rope_base={self.window_rope_base} has no rope_base beside it: set both or neither"
            )
        if self.rope_base is not None and self.head_dim % 2:
            raise ElrError(
                f"attention.head_dim={self.head_dim} is odd: rotary positions turn pairs; or set rope_base=None"
            )

    def base(self, letter: str) -> float | None:
        """Rotary base of a layer letter."""
        return self.window_rope_base if letter == "S" and self.window_rope_base is not None else self.rope_base


@dataclass(frozen=True, kw_only=True)
class DeltaProductConfig:
    """Gated DeltaProduct: N value heads of width V, whose states K key heads of width H write and read.

    Two public layers differ: Megatron-LM's has the defaults here, flash-linear-attention's has
    `negative_eigenvalues=True` and `norm="head"`. One Householder step is Gated DeltaNet.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    householder: int = 3
    """Householder steps P of each token."""
    conv_size: int = 4
    """Tokens the causal convolution of queries, keys and values sees, the token's own included."""
    negative_eigenvalues: bool = False
    """Step sizes β up to 2 instead of 1, so that a step may mirror a direction."""
    norm: Literal["group", "head"] = "group"
    """RMSNorm after the output gate, over the heads that share a key head; or before it, over each head alone."""

    def __post_init__(self):
        for name in ("num_heads", "num_key_heads", "key_dim", "value_dim", "householder", "conv_size"):
            _positive(f"delta.{name}", getattr(self, name))
        _known_choices("delta.", self)
        if self.num_heads % self.num_key_heads:
            raise ElrError(
                f"delta.num_heads={self.num_heads} is not a multiple of num_key_heads={self.num_key_heads}: "
                "every key head serves the same number of heads"
            )


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Feed-forward sub-layer of width F: `swiglu` has a gate matrix, `squared_relu` has none."""

    d_ff: int
    kind: Literal["swiglu", "squared_relu"] = "swiglu"

    def __post_init__(self):
        _positive("mlp.d_ff", self.d_ff)
        _known_choices("mlp.", self)


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of E experts of width `d_expert`, of which each token gets k, beside one of width `d_shared` for all."""

    num_experts: int
    top_k: int
    d_expert: int
    d_shared: int = 0
    """Width of the shared expert; 0: there is none."""
    kind: Literal["swiglu", "squared_relu"] = "swiglu"
    route_scale: float = 1.0
    """What the weights of a token's experts sum to."""
    replay: bool = False
    """Give a token in later rounds of the core the experts of its first, weighted anew."""

    def __post_init__(self):
        for name in ("num_experts", "top_k", "d_expert"):
            _positive(f"moe.{name}", getattr(self, name))
        _known_choices("moe.", self)
        if self.top_k > self.num_experts:
            raise ElrError(f"moe.top_k={self.top_k} is more than num_experts={self.num_experts}: a token has no more")
        if self.d_shared < 0:
            raise ElrError(f"moe.d_shared={self.d_shared} must be 0, for no shared expert, or more")
        if not self.route_scale > 0:
            raise ElrError(f"moe.route_scale={self.route_scale} must be above 0")


@dataclass(frozen=True, kw_only=True)
class SphereConfig:
    """The normalised transformer (nGPT): hidden states, queries, keys and matrix rows of norm 1.

    Layers join the stream by a learned step on the unit sphere, attention has an output gate, and the sub-layers' inner
    activations are normalised before the last product. Scale vectors are stored as multiples of `init_std` and used as
    `stored · value at the start / init_std`.
    """

    init_std: float = 0.0177
    """What the stored scales (rates, query, gate and logit scales) start at."""
    rate_init: float = 0.05
    """Step towards a sub-layer's output at the start."""
    gate_init: float | None = None
    """Scale of the output gate's logits at the start; None: √D."""
    embedding_norm: bool = False
    """Normalise the embedding's output too. Of the ports of Dory, transformers does, vLLM does not."""

    def __post_init__(self):
        for name in ("init_std", "rate_init", "gate_init"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ElrError(f"sphere.{name}={value} must be above 0")


@dataclass(frozen=True, kw_only=True)
class ConditioningConfig:
    """Core and coda layers are told the progress i/k of round i of k and the budget k/max_loops.

    Raising `loop.max_loops` of trained parameters therefore changes what they are told.
    """

    width: int = 256
    """Numbers in the condition vector."""
    sinusoids: int = 256
    """Sines and cosines each input is embedded by."""
    rank: int = 256
    """Inner width of the low-rank correction."""
    progress: bool = True
    """Tell i/k."""
    budget: bool = True
    """Tell k/max_loops."""
    scale_shift: bool = True
    """Scale and shift of a layer's normed input."""
    low_rank: bool = True
    """Low-rank correction of a layer's input, gated by the condition."""
    rescale: bool = True
    """Scale of a layer's output."""

    def __post_init__(self):
        for name in ("width", "sinusoids", "rank"):
            _positive(f"conditioning.{name}", getattr(self, name))
        if self.sinusoids % 2:
            raise ElrError(f"conditioning.sinusoids={self.sinusoids} is odd: half are sines, half cosines")
        if not (self.progress or self.budget):
            raise ElrError("conditioning.progress=False and budget=False tell the layers nothing: set one of them")
        if not (self.scale_shift or self.low_rank or self.rescale):
            raise ElrError("conditioning.scale_shift, low_rank and rescale are all False: set one, or no conditioning")


@dataclass(frozen=True, kw_only=True)
class LoopRule:
    """How the core's rounds are joined; each field picks one variant of `elr_jax.loop`.

    Known models: ELR = copy, none, adaptive_delta. Dory = copy, residual, replace, unit boundary. Parcae = random,
    gated, replace, linear readout. Huginn = random, concat, replace. A plain transformer = copy, none, replace at one
    loop.
    """

    initial: Literal["copy", "zero", "random"] = "copy"
    inject: Literal["none", "residual", "concat", "gated"] = "none"
    update: Literal["replace", "residual", "delta", "adaptive_delta"] = "adaptive_delta"
    boundary: Literal["none", "rms", "unit"] = "none"
    readout: Literal["none", "linear"] = "none"
    max_loops: int = 4
    """Largest loop count a program of this model can run."""

    def __post_init__(self):
        _positive("loop.max_loops", self.max_loops)
        _known_choices("loop.", self)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The identity of a checkpoint: three strings of layers, their sizes and the loop rule."""

    vocab_size: int
    d_model: int
    prelude: str
    core: str
    coda: str
    attention: AttentionConfig
    mlp: MLPConfig
    delta: DeltaProductConfig | None = None
    """Sizes of the `D` layers; None where there are none."""
    moe: MoEConfig | None = None
    """Sizes of the `E` layers; None where there are none."""
    loop: LoopRule = field(default_factory=LoopRule)
    tie_embeddings: bool = False
    norm_eps: float = 1e-6
    residual_init: Literal["scaled", "zero"] = "scaled"
    """Start of the sub-layers' output projections: divided by √(number of sub-layers), or zero."""
    sphere: SphereConfig | None = None
    """The normalised transformer instead of pre-norm residuals."""
    conditioning: ConditioningConfig | None = None
    """What layers are told of the loop; None: nothing."""
    max_positions: int | None = None
    """Longest context the model was made for; None sets no limit."""

    def __post_init__(self):
        _known_choices("", self)
        _positive("vocab_size", self.vocab_size)
        _positive("d_model", self.d_model)
        if self.max_positions is not None:
            _positive("max_positions", self.max_positions)
        for name in ("prelude", "core", "coda"):
            for position, letter in enumerate(getattr(self, name)):
                if letter not in LETTERS:
                    known = ", ".join(f"'{key}' ({text})" for key, text in LETTERS.items())
                    found = f"{name}={getattr(self, name)!r} has the unknown letter {letter!r} at {position}"
                    raise ElrError(f"{found}: use {known}")
        if self.sphere is not None and self.residual_init != "scaled":
            raise ElrError(f"residual_init={self.residual_init!r} has no place on the unit sphere: leave it out there")
        if self.sphere is not None and self.conditioning is not None:
            raise ElrError("conditioning has no place on the unit sphere, whose layers have no norm: leave out one")
        for letter in "VGRDE":
            if letter in self.layers and self.sphere is not None:
                raise ElrError(
                    f"sphere has no form of the {letter} in {self.layers!r}: use other layers, or sphere=None"
                )
        for letter, name, sizes in (("D", "delta", "DeltaProductConfig"), ("E", "moe", "MoEConfig")):
            if letter in self.layers and getattr(self, name) is None:
                raise ElrError(f"{name}=None leaves the {letter} of {self.layers!r} without sizes: give a {sizes}")
        if "V" in self.layers and self.attention.value_gate_inputs > self.d_model:
            raise ElrError(
                f"attention.value_gate_inputs={self.attention.value_gate_inputs} is more than d_model={self.d_model}: "
                "a V layer has no more inputs"
            )
        self._check_readers()
        if not self.core:
            raise ElrError("core='' is empty: a looped model needs at least one layer to loop over")

    def _check_readers(self) -> None:
        """Every `R` needs a `G` above it, in a core with a `G` one of the same round."""
        outside = {"prelude": "", "core": "" if "G" in self.core else self.prelude, "coda": self.prelude + self.core}
        for name, above in outside.items():
            letters = getattr(self, name)
            if "R" in letters and "G" not in above + letters[: letters.index("R")]:
                raise ElrError(
                    f"{name}={letters!r} has an R without a G above it whose keys it could read: put one there"
                )

    @property
    def layers(self) -> str:
        """All letters in order, one physical layer each."""
        return self.prelude + self.core + self.coda

    @property
    def boundary(self) -> "Boundary | None":
        """Where the encoder ends: below the last `G`, after the whole core if that is where it is.

        What a token leaves to later ones from there on are window keys. None without a `G`, or where a layer below has
        another memory.
        """
        for name in ("coda", "core", "prelude"):
            if "G" in getattr(self, name):
                index = getattr(self, name).rindex("G") + 1
                found = Boundary("coda", 0) if name == "core" else Boundary(name, index)
                return found if set(found.decoder(self)) <= set("RS-E") else None
        return None


class Boundary(NamedTuple):
    """A place in one of the stacks that run once, below its first `above` layers."""

    stack: Literal["prelude", "coda"]
    above: int

    def decoder(self, config: ModelConfig, *, loops: int = 1) -> str:
        """The letters from there on, as a token passes them."""
        if self.stack == "coda":
            return config.coda[self.above :]
        return config.prelude[self.above :] + loops * config.core + config.coda

    def replayed(self, config: ModelConfig, *, loops: int) -> int:
        """How many of a prompt's last tokens the decoder must read for the last one's exact output and window keys.

        n windows of W below each other reach n(W−1) tokens back.
        """
        letters = self.decoder(config, loops=loops)
        return (letters.count("R") + letters.count("S")) * (config.attention.window - 1) + 1


def decoder_of(config: ModelConfig) -> Boundary:
    """Where the decoder of a causal encoder-decoder begins.

    Raises:
        ElrError: a model without a decoder whose memory is windows.
    """
    if config.boundary is None:
        raise ElrError(
            f"layers {config.layers!r} have no decoder to skip: below their last G may be R, S and feed-forward alone"
        )
    return config.boundary


Remat = Literal["none", "dots", "layer", "offload", "round"]


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How to run a model on this machine; never changes what it computes beyond rounding."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of activations and of the weights' working copy; sums are float32 or wider. float64 needs jax_enable_x64."""
    loop: Literal["bounded", "scan"] = "bounded"
    """`bounded` runs as many rounds as the batch's deepest example; `scan` always runs `max_loops`."""
    remat: Remat = "layer"
    """What the backward pass keeps: everything, products, each layer's input (with `offload` in the host's memory), or
    each round's incoming state."""
    gather_core: bool = True
    """On a mesh with `data` or `fsdp`: gather the core's weights before its rounds and sum their gradients after them.

    Each device then needs memory for the whole core and its gradient, and runs as many rounds as its own rows need;
    as any rows need where another axis cuts them. False exchanges weights and gradients in every round.
    """
    kernels: Literal["auto", "xla", "pallas_tpu", "pallas_gpu"] = "auto"
    """Form of the fused operations: the best one known for the platform, or one that runs or says why it can't."""

    def __post_init__(self):
        _known_choices("runtime.", self)

    @property
    def implementation(self) -> Any:
        """`kernels` as the operations take it: None leaves the choice to them."""
        return None if self.kernels == "auto" else self.kernels


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ElrError(f"{name}={value} must be at least 1")


def _known_choices(prefix: str, config: Any) -> None:
    """Refuse a value outside its field's `Literal`."""
    for field_ in dataclasses.fields(config):
        value, allowed = getattr(config, field_.name), get_args(field_.type)
        if get_origin(field_.type) is Literal and value not in allowed:
            raise ElrError(f"{prefix}{field_.name}={value!r} is unknown: choose one of {', '.join(allowed)}")


def _converter(unions: tuple[Any, ...], *, omit_defaults: bool = False) -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, omit_if_default=omit_defaults)
    for union in unions:
        configure_tagged_union(union, converter, tag_name="kind")
    return converter


def to_dict(config: Any, *, unions: tuple[Any, ...] = (), omit_defaults: bool = False) -> dict[str, Any]:
    """A config as JSON-ready data; members of the unions carry their class name as `kind`.

    Without the defaults it tells what was chosen, and stays the same when a config gets a new field.
    """
    return _converter(unions, omit_defaults=omit_defaults).unstructure(config, unstructure_as=type(config))


def from_dict(cls: type[T], data: dict[str, Any], *, unions: tuple[Any, ...] = ()) -> T:
    """The config that `to_dict` wrote; unknown or missing keys raise an `ElrError` that names them."""
    try:
        return _converter(unions).structure(data, cls)
    except cattrs.BaseValidationError as error:
        raise ElrError(f"{cls.__name__} can't be read: {'; '.join(cattrs.transform_error(error))}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ElrError(f"{path} is absent: put it beside the tensors") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ElrError(f"{path} can't be read ({error}): put back a good copy") from error
    if not isinstance(data, dict):
        raise ElrError(f"{path} holds a {type(data).__name__} and no table: put back a good copy")
    return data


def digest(data: Any) -> str:
    """Sixteen hex digits that change when any value of the JSON-ready data changes."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
