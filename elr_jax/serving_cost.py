"""What serving a model costs: bytes of cache, requests that fit, and the rooflines of prefill and decode.

    python -m elr_jax.serving_cost koi_4b --hardware h200 --context 131072
    python -m elr_jax.serving_cost runs/elastic/model.json --loops 1 4 --policy per_loop last_loop

Everything is arithmetic on the config: nothing is run. Weights are read once a pass, the core's once a loop; of a
mixture of experts those that the batch's tokens hit on average. A step takes what its operations take at the device's
peak or its bytes in memory, whichever is more, so times are bounds from below.
"""

import csv
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import tyro
from rich.console import Console
from rich.table import Table

from elr_jax import flops, presets
from elr_jax.cache import CacheMode, cache_bytes, init_cache
from elr_jax.config import ModelConfig, decoder_of, from_dict, read_json
from elr_jax.errors import ElrError, one_line_errors
from elr_jax.hardware import HARDWARE
from elr_jax.parameters import param_specs
from elr_jax.params import count_params

Dtype = Literal["float32", "bfloat16", "float8"]
BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}
GIB = 2**30


class Cost(NamedTuple):
    """What one choice of hardware, cache and loop counts costs; bytes, tokens, seconds."""

    hardware: str
    policy: CacheMode
    loops: int
    weights: int
    token_bytes: int
    """What one more token adds to a request's cache."""
    request_bytes: int
    """Cache of a request of the whole context."""
    pool: float
    """Room for caches beside the weights; negative where these don't fit."""
    pool_tokens: float
    requests: int
    prefill: float
    """Seconds of a prompt as long as the context."""
    decode: float
    """Seconds of a step of the batch."""
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What to count."""

    model: Annotated[str, tyro.conf.Positional]
    """Name of a preset (koi_4b, dory_4b, elr_30b_a3b, …) or a JSON file of a ModelConfig."""
    hardware: tuple[str, ...] = ("h200",)
    """Names: a100, h100, h200, b200, gb200x4, v5e, v5p, v6e."""
    policy: tuple[CacheMode, ...] = ("per_loop", "last_loop")
    loops: tuple[int, ...] = ()
    """Loop counts of decoding; none: the model's largest."""
    prefill_loops: int | None = None
    """Loop count of prompts; None: that of decoding."""
    skip_decoder: bool = False
    """Let the decoder of a causal encoder-decoder read of a prompt only what the answer depends on."""
    context: int = 131_072
    """Tokens of a request."""
    batch: int = 1
    """Requests a decode step serves."""
    weight_dtype: Dtype = "bfloat16"
    cache_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    utilisation: float = 0.9
    """Share of the memory that weights and caches may take."""
    csv: str | None = None
    """File to write the rows to; None writes nothing."""
    figure: str | None = None
    """File for a figure of requests against loops; None draws nothing."""

    def __post_init__(self):
        for name in self.hardware:
            if name not in HARDWARE:
                raise ElrError(f"hardware={name!r} is unknown: choose from {', '.join(HARDWARE)}")
        for name in ("context", "batch"):
            if getattr(self, name) < 1:
                raise ElrError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.utilisation <= 1:
            raise ElrError(f"utilisation={self.utilisation} must be above 0 and at most 1")


def main(settings: Serving) -> list[Cost]:
    """Print the table, write what was asked for, and return the rows."""
    config = find_model(settings.model)
    most = config.loop.max_loops
    bad = [loops for loops in (*settings.loops, settings.prefill_loops or 1) if not 1 <= loops <= most]
    if bad:
        raise ElrError(f"loops={bad[0]} is outside 1…{most} of {settings.model}")
    rows = [
        serving_cost(config, settings, name, policy, loops)
        for name in settings.hardware
        for loops in settings.loops or (most,)
        for policy in settings.policy
    ]
    _print(config, settings, rows)
    if settings.csv is not None:
        with Path(settings.csv).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([Cost._fields, *rows])
        print(f"written to {settings.csv}")
    if settings.figure is not None:
        _draw(config, settings, Path(settings.figure))
        print(f"drawn in {settings.figure}")
    return rows


def find_model(name: str) -> ModelConfig:
    """A preset's config, or that of a JSON file."""
    path = Path(name)
    if path.suffix == ".json":
        return from_dict(ModelConfig, read_json(path))
    make: Any = vars(presets).get(name)
    if not inspect.isfunction(make) or inspect.get_annotations(make).get("return") is not ModelConfig:
        raise ElrError(f"model={name!r} is no preset and no .json file: try koi_4b, dory_4b, elr_30b_a3b or tiny_text")
    if any(parameter.default is parameter.empty for parameter in inspect.signature(make).parameters.values()):
        raise ElrError(f"model={name!r} needs arguments: write its config with to_dict to a .json file")
    return make()


def serving_cost(config: ModelConfig, settings: Serving, hardware: str, policy: CacheMode, loops: int) -> Cost:
    """The costs at one loop count; a cache has a slot for each loop that is run."""
    device = HARDWARE[hardware]
    prompt_loops = settings.prefill_loops or loops
    slots = max(loops, prompt_loops)

    def cache(tokens: int) -> int:
        return sum(cache_bytes(config, tokens=tokens, loops=slots, mode=policy, dtype=settings.cache_dtype))

    far = max(settings.context, config.attention.window)
    token_bytes, request_bytes = cache(far + 1) - cache(far), cache(settings.context)
    width = BYTES[settings.weight_dtype]
    weights = flops.num_params(config) * width
    pool = settings.utilisation * device.memory - weights
    # a query meets half of the context on average while the prompt is read, all of it afterwards
    all_layers = decoded_tokens(config, settings, prompt_loops)
    reading = flops.forward_flops(config, seq_len=settings.context).at(prompt_loops) * all_layers
    if all_layers < settings.context:
        encoder = flops.encoder_flops(config, seq_len=settings.context).at(prompt_loops)
        reading += encoder * (settings.context - all_layers)
    step = flops.forward_flops(config, seq_len=2 * settings.context).at(loops) * settings.batch
    moved = weight_reads(config, loops, tokens=settings.batch) * width + settings.batch * cache_reads(
        config, settings, loops
    )
    prefill_reads = weight_reads(config, prompt_loops, tokens=settings.context) * width
    decode = device.roofline(step, moved)
    return Cost(
        hardware=hardware,
        policy=policy,
        loops=loops,
        weights=weights,
        token_bytes=token_bytes,
        request_bytes=request_bytes,
        pool=pool,
        pool_tokens=pool_tokens(pool, token_bytes),
        requests=max(int(pool // request_bytes), 0),
        prefill=device.roofline(reading, prefill_reads),
        decode=decode,
        tokens_per_second=settings.batch / decode,
    )


def decoded_tokens(config: ModelConfig, settings: Serving, loops: int) -> int:
    """Tokens of a prompt that the decoder reads."""
    if not settings.skip_decoder:
        return settings.context
    return min(decoder_of(config).replayed(config, loops=loops), settings.context)


def pool_tokens(pool: float, token_bytes: float) -> float:
    """Tokens whose cache fits."""
    return max(pool, 0.0) / token_bytes if token_bytes else float("inf")


def weight_reads(config: ModelConfig, loops: float, *, tokens: int) -> float:
    """Parameters read in a pass of so many tokens: the core's once a loop, of experts those that are hit on average."""
    specs = param_specs(config)

    def stack(name: str) -> float:
        if config.moe is None:
            return count_params(getattr(specs, name))
        missed = (1 - config.moe.top_k / config.moe.num_experts) ** tokens
        mixtures = getattr(config, name).count("E") * config.moe.num_experts * flops.expert_params(config)
        return count_params(getattr(specs, name)) - missed * mixtures

    once = stack("prelude") + stack("coda") + config.vocab_size * config.d_model
    return once + loops * (stack("core") + count_params(specs.loop))


def cache_reads(config: ModelConfig, settings: Serving, loops: int) -> float:
    """Bytes of one request's cache that a decode step reads: a core layer's slot in every loop."""
    shapes = jax.eval_shape(lambda: init_cache(config, 1, settings.context, loops=1, dtype=settings.cache_dtype))
    prelude, core, coda = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(entries))
        for entries in (shapes.prelude, shapes.core, shapes.coda)
    )
    return prelude + loops * core + coda


def _print(config: ModelConfig, settings: Serving, rows: list[Cost]) -> None:
    active = flops.active_params(config)
    told = f"{flops.num_params(config):,} parameters" + (f", {active:,} active" if config.moe else "")
    table = Table(
        *("hardware", "cache", "loops", "weights GiB", "KB/token", "GiB/request", "pool Mtokens", "requests"),
        *("prefill s", "decode ms", "tokens/s"),
        title=f"{settings.model}: {told}; context {settings.context:,}, batch {settings.batch}; bounds, not measured",
        title_justify="left",
    )
    for row in rows:
        table.add_row(
            *(row.hardware, row.policy, str(row.loops), f"{row.weights / GIB:.2f}", f"{row.token_bytes / 1024:.1f}"),
            *(f"{row.request_bytes / GIB:.2f}", f"{row.pool_tokens / 1e6:.2f}", str(row.requests)),
            *(f"{row.prefill:.2f}", f"{1000 * row.decode:.2f}", f"{row.tokens_per_second:,.0f}"),
        )
    Console().print(table)
    for name in settings.hardware:
        device = HARDWARE[name]
        sizes = f"{device.memory / 1e9:.0f} GB, {device.bandwidth / 1e12:.2f} TB/s, {device.flops / 1e12:.0f} TFLOP/s"
        print(f"{name}: {sizes} ({device.source})")


def _draw(config: ModelConfig, settings: Serving, path: Path) -> None:
    """Requests of the whole context that fit, against loops, a line for each policy and hardware."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    counts = range(1, config.loop.max_loops + 1)
    for name in settings.hardware:
        for policy, style in zip(settings.policy, ("-o", "--s"), strict=False):
            fits = [serving_cost(config, settings, name, policy, loops).requests for loops in counts]
            axis.plot(list(counts), fits, style, label=f"{name}, {policy}")
    axis.set(xlabel="loops", ylabel=f"requests of {settings.context:,} tokens that fit", title=settings.model)
    axis.set_xticks(list(counts))
    axis.set_ylim(bottom=0)
    axis.legend()
    axis.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Serving, description=__doc__, prog="python -m elr_jax.serving_cost"))
        sys.exit(0)
