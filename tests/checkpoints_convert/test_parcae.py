"""Parcae against values recorded from its authors' own code: logits at each loop count, a loss and every gradient."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import load_parcae
from checkpoints_convert.convert import Parcae, run_parcae
from checkpoints_convert.leaves import leaf_paths
from checkpoints_convert.parcae import parcae_config, slots
from checkpoints_convert.tensor_file import write_tensors
from elr_jax import model, presets
from elr_jax.errors import ElrError
from elr_jax.train.runner import load_params

GOLDEN = Path(__file__).parents[1] / "golden" / "parcae_small.npz"
CONFIG = {
    "_class_name": "ParcaeConfig",
    "block_size": 64,
    "n_embd": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "padded_vocab_size": 128,
    "rope_settings": {"use_rope": True, "rope_condense_ratio": 1, "rope_base": 50_000},
    "block_class_name": "TransformerPreNormBlock",
    "norm_class_name": "RMSNorm",
    "norm_eps": 1e-5,
    "mlp_class_name": "BaseMLP",
    "nonlin_name": "ReLU2",
    "bias": False,
    "qk_norm": True,
    "prelude_norm": True,
    "tie_embeddings": True,
    "init_strategy": "scaled-zero",
    "injection_type": "diagonal",
    "state_init": "zero",
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 2,
    "recurrent_embedding_dimension": 64,
    "recurrent_intermediation_embedding_dimension": 256,
    "mean_recurrence": 8,
    "mean_backprop_depth": 4,
}


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN)


def tensors_of(golden):
    return {name.removeprefix("param/"): golden[name] for name in golden.files if name.startswith("param/")}


def write(folder, tensors, config=CONFIG):
    shapes = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    write_tensors(folder / "model.safetensors", shapes, lambda name: [tensors[name]])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def loaded(golden, tmp_path_factory):
    return load_parcae(write(tmp_path_factory.mktemp("parcae"), tensors_of(golden)))


def test_the_config_says_what_the_model_is(loaded):
    _, config = loaded
    assert (config.prelude, config.core, config.coda) == ("*-V-",) * 3
    assert (config.loop.inject, config.loop.readout, config.loop.initial) == ("gated", "linear", "zero")
    assert config.loop.max_loops == 24 and config.tie_embeddings


@pytest.mark.parametrize("loops", [1, 2, 4, 8])
def test_logits_are_the_authors(golden, loaded, loops):
    params, config = loaded
    apply = jax.jit(partial(model.apply, config=config))
    logits = apply(params, golden["tokens"], jnp.full(4, loops, jnp.int32))
    expected = golden[f"logits/loops{loops}"]
    assert np.abs(expected).max() > 1
    assert np.abs(logits - expected).max() <= 3e-5  # found: 1.5e-5, of logits up to 15


def test_loss_and_every_gradient_are_the_authors(golden, loaded):
    """Rows of 1, 3, 6 and 9 rounds, gradients through the last four of each."""
    params, config = loaded
    labels = golden["labels"]
    weights = (labels >= 0).astype(np.float32)

    @jax.jit
    def run(params):
        def mean_loss(params):
            total, _ = model.loss(
                params,
                golden["tokens"],
                np.maximum(labels, 0),
                weights,
                golden["depth"],
                config=config,
                backprop_loops=4,
            )
            return total / weights.sum()

        return jax.value_and_grad(mean_loss)(params)

    loss, grads = run(params)
    assert loss == pytest.approx(float(golden["train/loss"]), rel=1e-5)
    by_leaf = dict(zip(leaf_paths(grads), map(np.asarray, jax.tree.leaves(grads)), strict=True))
    for tensor, slot in slots(config).items():
        # loading is a permutation times a number, whose adjoint is saving times its square
        number = np.empty(slot.spec.shape, np.float32)
        slot.transform.load(np.ones(slot.file_shape, np.float32), slot.spec, number)
        found = slot.transform.save(by_leaf[slot.leaf], slot.spec) * number.max() ** 2
        expected = golden[f"grad/{tensor}"]
        error, size = np.abs(found - expected).max(), np.abs(expected).max()
        assert size > 0 and error <= 1e-4 * size, f"{tensor} is off by {error} of {size}"


def test_what_is_loaded_is_what_is_saved(golden, loaded):
    params, config = loaded
    by_leaf = dict(zip(leaf_paths(params), map(np.asarray, jax.tree.leaves(params)), strict=True))
    known = slots(config)
    assert known.keys() == tensors_of(golden).keys()
    for tensor, slot in known.items():
        assert (slot.transform.save(by_leaf[slot.leaf], slot.spec) == golden[f"param/{tensor}"]).all()


def test_wrapped_names_buffers_and_a_tied_head_change_nothing(golden, loaded, tmp_path):
    tensors = {f"_orig_mod.module.{name}": array for name, array in tensors_of(golden).items()}
    tensors["_orig_mod.module.freqs_cis"] = np.zeros((1, 64, 1, 8, 2), np.float32)
    tensors["_orig_mod.module.lm_head.weight"] = golden["param/transformer.wte.weight"]
    params, _ = load_parcae(write(tmp_path, tensors), max_loops=8)
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (params, loaded[0])), strict=True))


@pytest.mark.parametrize(
    "change, named",
    [
        ({"injection_type": "linear"}, "injection_type='linear'"),
        ({"nonlin_name": "GELU"}, "nonlin_name='GELU'"),
        ({"logit_softcap": 15.0}, "logit_softcap=15.0"),
        ({"init_strategy": "takase"}, "init_strategy='takase'"),
        ({"recurrent_embedding_dimension": 128}, "recurrent_embedding_dimension"),
        ({"rope_settings": {"rope_condense_ratio": 2}}, "rope_condense_ratio"),
        ({"state_init": "unit"}, "unit"),
        ({"n_layers_in_prelude": None}, "no Parcae config"),
        ({"n_layers_in_recurrent_block": 3, "mean_recurrence": 7}, "value embedding without a gate"),
    ],
)
def test_what_is_not_computed_here_is_refused(change, named):
    with pytest.raises(ElrError, match=named):
        parcae_config(CONFIG | change, name="config.json")


def test_tensors_that_do_not_fit_are_named_together(golden, tmp_path):
    tensors = tensors_of(golden)
    tensors["transformer.extra"] = tensors.pop("transformer.ln_f.weight")
    tensors["transformer.C.weight"] = tensors["transformer.C.weight"][:32]
    with pytest.raises(ElrError, match=r"missing: transformer.ln_f.weight.*unknown: transformer.extra.*C.weight \[32"):
        load_parcae(write(tmp_path, tensors))


def test_a_run_folder_from_the_command(golden, loaded, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    assert run_parcae(Parcae(source=str(write(tmp_path / "in", tensors_of(golden))), out=str(tmp_path / "out"))) == 0
    params, config = load_params(str(tmp_path / "out"))
    assert config == loaded[1]
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (params, loaded[0])), strict=True))
    assert "337,280 parameters are in" in capsys.readouterr().out


@pytest.mark.parametrize("size, shape", [("140m", (2, 768, 6)), ("1.3b", (8, 1536, 12))])
def test_presets_are_what_published_configs_say(size, shape):
    blocks, width, heads = shape
    published = CONFIG | {
        "block_size": 2048,
        "n_embd": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 32768,
        "padded_vocab_size": 32768,
        "state_init": "like-init",
        **{f"n_layers_in_{name}": blocks for name in ("prelude", "recurrent_block", "coda")},
        "recurrent_embedding_dimension": width,
        "recurrent_intermediation_embedding_dimension": 4 * width,
    }
    assert parcae_config(published, name="config.json") == presets.parcae(size)


@pytest.mark.parity
def test_a_torch_file_is_read_without_unpickling(golden, loaded, tmp_path):
    torch = pytest.importorskip("torch")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensors = {name: torch.from_numpy(array) for name, array in tensors_of(golden).items()}
    torch.save(tensors, tmp_path / "model.pt")
    params, _ = load_parcae(tmp_path)
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (params, loaded[0])), strict=True))
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    torch.save(halves, tmp_path / "model.pt")
    narrow, _ = load_parcae(tmp_path)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(narrow))
    torch.save({"code": print}, tmp_path / "model.pt")
    with pytest.raises(ElrError, match="can't be read as tensors alone"):
        load_parcae(tmp_path)
