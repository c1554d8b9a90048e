"""Dory here against Dory in PyTorch: prefill, cached greedy decoding and a training step, in one process, in turns.

    python -m benchmarks.dory_vs_torch                   about twenty minutes on two cores
    python -m benchmarks.dory_vs_torch --preset gpu      bfloat16 on one accelerator

Random weights of about 100M parameters (`cpu`: width 640, blocks 3 | 6 | 3) or 1.8B (`gpu`). The opponents are
transformers' model, eager and, with `--compile`, through `torch.compile`; where transformers has no Dory, a plain
PyTorch model of the same shapes. Both sides use the same threads, decode from their own caches and hand every token to
the host. `of peak` is the share of a measured matrix product's speed that the step's products reach.
"""

# pyright: reportMissingImports=false
# torch and transformers are in the parity extra alone

import dataclasses
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from benchmarks.report import Row, tell_machine, tell_table, write_json
from benchmarks.timing import Timing, machine, race, require_torch
from checkpoints_convert import load_dory
from checkpoints_convert.random_dory import write_random_dory
from elr_jax import decode, flops, incremental, model
from elr_jax.cache import init_cache
from elr_jax.config import AttentionConfig, MLPConfig, ModelConfig, Remat, Runtime, SphereConfig
from elr_jax.decode.prompts import pack_requests
from elr_jax.decode.sampling import GREEDY
from elr_jax.errors import one_line_errors
from elr_jax.presets import DORY
from elr_jax.typing import Array

Part = Literal["prefill", "decode", "train"]
Contestants = dict[str, Callable[[], Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Versus:
    """What to race, and for how long."""

    preset: Literal["cpu", "gpu", "smoke"] = "cpu"
    """Model sizes and number type."""
    parts: tuple[Part, ...] = ("prefill", "decode", "train")
    loops: tuple[int, ...] = (1, 2, 4)
    batches: tuple[int, ...] = (1, 8)
    """Batch sizes of decoding."""
    repeats: int = 5
    """Turns of each contestant."""
    decode_tokens: int = 16
    """Tokens of one decoding turn."""
    compile: bool = True
    """Race torch.compile too; it takes minutes to compile."""
    remat: Remat = "dots"
    """What the backward pass of the training step keeps."""
    json: str | None = None
    """File to write the rows to."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a preset sets."""

    model: ModelConfig
    dtype: Literal["float32", "bfloat16"]
    prefill: tuple[int, int]
    """Rows and tokens."""
    train: tuple[int, int]
    prompt: int = 64
    """Tokens in the cache before decoding."""


def sizes_of(preset: str) -> Sizes:
    """The sizes of a preset."""
    small = dory(640, heads=10, kv_heads=2, head_dim=64, d_ff=1792, vocab_size=32_768)
    if preset == "cpu":
        return Sizes(model=small, dtype="float32", prefill=(4, 512), train=(4, 256))
    if preset == "gpu":
        large = dory(2560, heads=16, kv_heads=4, head_dim=256, d_ff=7168, vocab_size=131_072)
        return Sizes(model=large, dtype="bfloat16", prefill=(8, 2048), train=(2, 2048))
    tiny = dory(32, heads=4, kv_heads=2, head_dim=8, d_ff=48, vocab_size=61)
    return Sizes(model=tiny, dtype="float32", prefill=(2, 16), train=(2, 8), prompt=4)


def dory(width: int, *, heads: int, kv_heads: int, head_dim: int, d_ff: int, vocab_size: int) -> ModelConfig:
    """Twelve blocks of Dory, split 3 | 6 | 3."""
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=width,
        prelude="S-S-S-",
        core="*-S-S-S-*-S-",
        coda="S-S-*-",
        attention=AttentionConfig(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope_base=1e7, window_rope_base=1e4
        ),
        mlp=MLPConfig(d_ff=d_ff),
        loop=DORY,
        sphere=SphereConfig(embedding_norm=True),  # as transformers has it
    )


def main(settings: Versus) -> dict[str, Any]:
    """Race every part and print ratios."""
    sizes = sizes_of(settings.preset)
    result: dict[str, Any] = {"machine": machine(), "settings": dataclasses.asdict(settings), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        write_random_dory(Path(folder) / "dory", sizes.model, dtype=sizes.dtype)
        params, _ = load_dory(Path(folder) / "dory")
        peer = load_peer(Path(folder) / "dory", sizes, threads=result["machine"]["cores"])
    result["peer"] = peer.name
    result["peak"] = peak = matmul_peak(sizes.dtype)
    shown = result["machine"] | {"peer": peer.name, "matmul GFLOP/s": f"{peak / 1e9:.0f}"}
    tell_machine(shown)
    parts = {"prefill": prefill, "decode": decoding, "train": training}
    for part in settings.parts:
        rows = []
        for label, work, unit, contestants in parts[part](settings, sizes, params, peer):
            times = race(contestants, repeats=settings.repeats)
            rows.append(_row(label, times, work=work, unit=unit, peak=peak))
        result["rows"] += [{"part": part} | row for row in rows]
        tell_table(part, rows)
    write_json(settings.json, result)
    return result


class Peer:
    """A PyTorch model: how to run it eagerly, and compiled."""

    def __init__(self, torch: Any, model: Any, *, plain: bool, device: str):
        self.torch, self.model, self.plain, self.device = torch, model.to(device), plain, device
        self.name = f"{'plain torch' if plain else 'transformers'} {torch.__version__}"

    def tokens(self, array: np.ndarray) -> Any:
        """Token ids on the device."""
        return self.torch.tensor(array, dtype=self.torch.long, device=self.device)

    def sync(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def prefill(self, forward: Any, tokens: Any, loops: int) -> None:
        """Last-token logits and a filled cache."""
        with self.torch.no_grad():
            if self.plain:
                forward(tokens, loops, {}, last_only=True)
            else:
                self.model.config.n_recurrent_loops = loops
                forward(tokens, use_cache=True, logits_to_keep=1)
        self.sync()

    def decoder(self, forward: Any, tokens: Any, loops: int, *, capacity: int) -> Callable[[int], None]:
        """A function that decodes some tokens more, greedily, each handed to the host.

        The eager model has transformers' growing cache, a compiled one its preallocated cache: each the faster there.
        """
        held: dict[str, Any] = {}

        def step(new: Any) -> Any:
            if self.plain:
                return forward(new, loops, held.setdefault("cache", {}), last_only=True)
            self.model.config.n_recurrent_loops = loops
            if "cache" not in held and forward is not self.model:
                from transformers import StaticCache

                held["cache"] = StaticCache(config=self.model.config, max_cache_len=capacity)
            # prompts are read eagerly: one more compilation would only be waited for
            run = forward if new.shape[1] == 1 else self.model
            out = run(new, cache=held.get("cache"), use_cache=True, logits_to_keep=1)
            held["cache"] = out.cache
            return out.logits

        def more(count: int) -> None:
            with self.torch.no_grad():
                if held.get("read", capacity) + count > capacity:  # begin again with the prompt
                    held.clear()
                    held["token"], held["read"] = step(tokens)[:, -1:].argmax(-1), tokens.shape[1]
                for _ in range(count):
                    held["token"] = step(held["token"])[:, -1:].argmax(-1)
                    held["token"].cpu()
                held["read"] += count

        return more

    def trainer(self, forward: Any, tokens: Any, loops: int) -> Callable[[], None]:
        """One AdamW step on the mean cross entropy."""
        torch = self.torch
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            if self.plain:
                logits = forward(tokens[:, :-1], loops)
            else:
                self.model.config.n_recurrent_loops = loops
                logits = forward(tokens[:, :-1], use_cache=False).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            self.sync()

        return step

    def forms(self, compile: bool) -> dict[str, Any]:
        """The forward pass, eager and compiled."""
        if not compile:
            return {"torch": self.model}
        self.torch._dynamo.reset()  # else its limit of recompilations is reached after some cases, and it gives up
        return {"torch": self.model, "torch.compile": self.torch.compile(self.model)}


def load_peer(path: Path, sizes: Sizes, *, threads: int) -> Peer:
    """transformers' model of the checkpoint, or the plain one."""
    torch = require_torch()
    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if importlib.util.find_spec("transformers.models.dory") is None:
        from safetensors.torch import load_file

        from benchmarks.plain_torch import PlainDory

        return Peer(torch, PlainDory(load_file(path / "model.safetensors"), sizes.model), plain=True, device=device)
    from checkpoints_convert import pytorch

    loaded = pytorch.load([path / "model.safetensors"], sizes.model, sizes.dtype)
    loaded.set_attn_implementation("sdpa")
    return Peer(torch, loaded, plain=False, device=device)


def matmul_peak(dtype: str) -> float:
    """Operations a second of a 2048³ product in JAX."""
    x = jnp.ones((2048, 2048), dtype)
    square = jax.jit(lambda x: x @ x)
    return 2 * 2048**3 / race({"matmul": lambda: square(x)}, repeats=7)["matmul"].fastest


def prefill(settings: Versus, sizes: Sizes, params: Any, peer: Peer) -> Iterator[tuple[str, float, str, Contestants]]:
    """A prompt's last-token logits, with the cache filled."""
    rows, length = sizes.prefill
    tokens = _tokens(sizes, rows, length)
    runtime = Runtime(dtype=sizes.dtype)

    @jax.jit
    def read(params: Any, tokens: Array, depth: Array):
        cache = init_cache(sizes.model, rows, length, dtype=sizes.dtype)
        return incremental.extend(
            params, tokens, depth, cache, config=sizes.model, runtime=runtime, fresh=True, last_only=True
        )

    cost = flops.forward_flops(sizes.model, seq_len=length)
    head = 2 * sizes.model.d_model * sizes.model.vocab_size
    for loops in settings.loops:
        depth = jnp.full(rows, loops, jnp.int32)
        contestants: Contestants = {"jax": partial(read, params, jnp.asarray(tokens), depth)}
        for name, forward in peer.forms(settings.compile).items():
            contestants[name] = partial(peer.prefill, forward, peer.tokens(tokens), loops)
        work = rows * length * (cost.at(loops) - head) + rows * head
        yield f"{rows}×{length}, {loops} loops", work, "s", contestants


def decoding(settings: Versus, sizes: Sizes, params: Any, peer: Peer) -> Iterator[tuple[str, float, str, Contestants]]:
    """Greedy tokens from a cache; on a CPU by the packed copies that `python -m elr_jax.decode` takes there."""
    runtime, config, count = Runtime(dtype=sizes.dtype), sizes.model, settings.decode_tokens
    if jax.default_backend() == "cpu":
        params = decode.working_copy(params, config=config, runtime=runtime)
    capacity = sizes.prompt + count * (settings.repeats + 2)
    step = jax.jit(partial(decode.decode_step, config=config, runtime=runtime, greedy=True), donate_argnums=1)
    for batch in settings.batches:
        tokens = _tokens(sizes, batch, sizes.prompt)
        for loops in settings.loops:
            contestants: Contestants = {"jax": _decoder(step, params, sizes, tokens, loops, capacity, count)}
            for name, forward in peer.forms(settings.compile).items():
                more = peer.decoder(forward, peer.tokens(tokens), loops, capacity=capacity)
                contestants[name] = partial(more, count)
            work = batch * count * flops.forward_flops(config, seq_len=1).at(loops)
            yield f"batch {batch}, {loops} loops", work, f"{batch * count} tok/s", contestants


def _decoder(
    step: Any, params: Any, sizes: Sizes, tokens: np.ndarray, loops: int, capacity: int, count: int
) -> Callable[[], None]:
    batch, length = tokens.shape
    held: dict[str, Any] = {}
    requests = pack_requests(
        batch,
        config=sizes.model,
        loops=loops,
        prefill_loops=None,
        max_new_tokens=10**6,
        sampling=GREEDY,
        stop_tokens=(),
    )

    def begin() -> None:
        state = decode.start(sizes.model, batch, capacity, loops=loops, dtype=sizes.dtype)
        read = jax.jit(partial(decode.prefill, config=sizes.model, runtime=Runtime(dtype=sizes.dtype), fresh=True))
        held["state"] = read(params, state, jnp.asarray(tokens), jnp.full(batch, length, jnp.int32), requests)
        held["read"] = length

    def more() -> None:
        if held.get("read", capacity) + count > capacity:
            begin()
        for _ in range(count):
            held["state"] = step(params, held["state"], requests)
            np.asarray(held["state"].token)
        held["read"] += count

    return more


def training(settings: Versus, sizes: Sizes, params: Any, peer: Peer) -> Iterator[tuple[str, float, str, Contestants]]:
    """Gradient of the mean cross entropy and an AdamW step; neither side projects the weights back to the sphere."""
    rows, length = sizes.train
    tokens, loops = _tokens(sizes, rows, length + 1), 2
    config = dataclasses.replace(sizes.model, loop=dataclasses.replace(sizes.model.loop, max_loops=loops))
    runtime, depth = Runtime(dtype=sizes.dtype, remat=settings.remat), jnp.full(rows, loops, jnp.int32)
    optimizer = optax.adamw(1e-6)

    def loss(params: Any, tokens: Array) -> Array:
        weights = jnp.full((rows, length), 1 / (rows * length))
        return model.loss(params, tokens[:, :-1], tokens[:, 1:], weights, depth, config=config, runtime=runtime)[0]

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, tokens: Array):
        updates, opt_state = optimizer.update(jax.grad(loss)(params, tokens), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    held = [jax.tree.map(jnp.copy, params), optimizer.init(params)]

    def more() -> None:
        held[:] = step(*held, jnp.asarray(tokens))
        jax.block_until_ready(held[0])

    contestants: Contestants = {"jax": more}
    for name, forward in peer.forms(settings.compile).items():
        contestants[name] = peer.trainer(forward, peer.tokens(tokens), loops)
    work = flops.train_flops(config, seq_len=length, sequences=rows, rounds=rows * loops)
    yield f"{rows}×{length}, {loops} loops", work, "s", contestants


def _tokens(sizes: Sizes, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, sizes.model.vocab_size, (rows, length), dtype=np.int32)


def _row(label: str, times: dict[str, Timing], *, work: float, unit: str, peak: float) -> Row:
    best = min((times[name] for name in times if name != "jax"), key=lambda time: time.median)
    tokens = float(unit.split()[0]) if "tok/s" in unit else None
    shown = {name: tokens / time.median if tokens else time.median for name, time in times.items()}
    return {
        "case": label,
        "unit": unit.split()[-1],
        **shown,
        "torch / jax": best.median / times["jax"].median,
        "fastest": min(times[name].fastest for name in times if name != "jax") / times["jax"].fastest,
        "of peak": work / times["jax"].median / peak,
    }


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Versus, description=__doc__))
