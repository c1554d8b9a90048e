"""The race against PyTorch at its smallest, and the plain PyTorch opponent: it computes what we compute."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.dory_vs_torch import Peer, Versus, main, sizes_of  # noqa: E402
from benchmarks.plain_torch import PlainDory  # noqa: E402
from checkpoints_convert import load_dory  # noqa: E402
from checkpoints_convert.random_dory import write_random_dory  # noqa: E402
from elr_jax import apply  # noqa: E402

pytestmark = pytest.mark.parity


def test_the_smallest_run(tmp_path, capsys):
    pytest.importorskip("transformers.models.dory")
    path = tmp_path / "versus.json"
    settings = Versus(
        preset="smoke", loops=(2,), batches=(2,), repeats=1, decode_tokens=2, compile=False, json=str(path)
    )
    result = main(settings)
    assert json.loads(path.read_text())["rows"] == result["rows"]
    assert [row["part"] for row in result["rows"]] == ["prefill", "decode", "train"]
    assert all(row["torch"] > 0 and row["jax"] > 0 for row in result["rows"])
    assert "torch / jax" in capsys.readouterr().out


def test_the_plain_opponent_is_the_same_model(tmp_path):
    """Whole, and as a prompt and steps from its cache; its embedding is not normed, so neither is ours."""
    safetensors_torch = pytest.importorskip("safetensors.torch")
    config = sizes_of("smoke").model
    folder = write_random_dory(tmp_path / "dory", config)
    params, read = load_dory(folder)
    plain = PlainDory(safetensors_torch.load_file(folder / "model.safetensors"), config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 9))
    expected = apply(params, jnp.asarray(tokens), jnp.full(2, 3, jnp.int32), config=read)
    peer = Peer(torch, plain, plain=True, device="cpu")
    with torch.no_grad():
        whole = plain(peer.tokens(tokens), 3)
        past = {}
        steps = [plain(peer.tokens(tokens[:, part]), 3, past) for part in (slice(0, 5), slice(5, 6), slice(6, 9))]
    np.testing.assert_allclose(whole.numpy(), expected, atol=5e-5)
    # several tokens after a past are told apart by the mask alone
    np.testing.assert_allclose(torch.cat(steps, 1).numpy(), expected, atol=5e-5)
