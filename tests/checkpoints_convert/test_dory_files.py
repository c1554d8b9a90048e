"""Dory checkpoints into parameters and back: every naming, type and shard, and every way they can be incomplete."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import assert_same_bits, tiny_dory

from checkpoints_convert import dory, file_bytes, load_dory, output, read_config, save_dory
from checkpoints_convert.dory_rules import LAYOUTS, slots
from checkpoints_convert.leaves import turn
from checkpoints_convert.random_dory import write_random_dory
from checkpoints_convert.tensor_file import read_entries, write_tensors
from elr_jax import presets
from elr_jax.config import MLPConfig
from elr_jax.errors import ElrError

CONFIG = tiny_dory()


def tensors_of(folder):
    return {name: entry.read() for name, entry in read_entries(folder / "model.safetensors").items()}


def write_file(path, arrays):
    types = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    write_tensors(path, types, lambda name: [arrays[name]])


@pytest.fixture
def checkpoint(tmp_path):
    return write_random_dory(tmp_path / "random", CONFIG)


def refused(checkpoint, *words):
    with pytest.raises(ElrError) as told:
        load_dory(checkpoint)
    assert all(word in str(told.value) for word in words), str(told.value)
    assert "\n" not in str(told.value)


def test_every_element_goes_to_its_place(checkpoint):
    """Element by element against the file, with torch's [out, in] written out."""
    tensors, (params, config) = tensors_of(checkpoint), load_dory(checkpoint)
    assert config == CONFIG
    params = jax.tree.map(np.asarray, params)
    n, k, h, d = 4, 2, 8, 32
    for layer, (sub, letter) in enumerate(zip(params.prelude + params.core + params.coda, CONFIG.layers, strict=True)):
        own = {name.split(f".{layer}.", 1)[1]: x for name, x in tensors.items() if f"layers.{layer}." in name}
        mixer = sub.mixer
        if letter == "-":
            expected = {
                "mlp_alpha": sub.rate,
                "mixer.gate_proj.weight": mixer.gate.T,
                "mixer.up_proj.weight": mixer.up.T,
                "mixer.down_proj.weight": mixer.down.T,
                "mixer.suv_gate": mixer.gate_scale,
                "mixer.suv_up": mixer.up_scale,
            }
        else:
            flat = lambda x, heads: [[x[i, a, b] for i in range(d)] for a in range(heads) for b in range(h)]
            out = [[mixer.output[a, b, i] for a in range(n) for b in range(h)] for i in range(d)]
            expected = {
                "attn_alpha": sub.rate,
                "mixer.q_proj.weight": flat(mixer.query, n),
                "mixer.k_proj.weight": flat(mixer.key, k),
                "mixer.v_proj.weight": flat(mixer.value, k),
                "mixer.g_proj.weight": flat(mixer.sphere.gate, n),
                "mixer.o_proj.weight": out,
                "mixer.sqk": [mixer.sphere.query_scale[a, b] for a in range(n) for b in range(h)],
                "mixer.s_gate": [mixer.sphere.gate_scale[a, b] for a in range(n) for b in range(h)],
            }
        assert own.keys() == expected.keys()
        for name, value in expected.items():
            assert np.array_equal(own[name], np.asarray(value)), (layer, name)
    assert np.array_equal(params.embedding, tensors["backbone.embeddings.weight"])
    assert np.array_equal(params.head, tensors["lm_head.weight"].T)
    assert np.array_equal(params.logit_scale, tensors["lm_head.logit_scale"])


@pytest.mark.parametrize("shape", [(1, 1), (256, 32), (600, 33), (31, 700)])
def test_a_matrix_is_turned_whole(shape):
    matrix = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    assert np.array_equal(turn(matrix, np.full(shape[::-1], np.nan)), matrix.T)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_naming_gives_the_same_parameters(tmp_path, checkpoint, layout):
    other = write_random_dory(tmp_path / layout, CONFIG, layout=layout, dialect="transformers")
    assert tensors_of(other).keys() == slots(CONFIG, layout).keys()
    assert layout == "released" or tensors_of(other).keys() != tensors_of(checkpoint).keys()
    assert_same_bits(load_dory(other)[0], load_dory(checkpoint)[0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_types_are_kept_and_converted(tmp_path, dtype):
    folder = write_random_dory(tmp_path / "random", CONFIG, dtype=dtype)
    kept, wide = load_dory(folder)[0], load_dory(folder, dtype=jnp.float32)[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {jnp.dtype(dtype)}
    assert_same_bits(wide, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), kept))


def test_a_file_of_several_types_keeps_each(checkpoint):
    arrays = tensors_of(checkpoint)
    arrays = {name: x.astype(ml_dtypes.bfloat16) if x.ndim == 2 else x for name, x in arrays.items()}
    write_file(checkpoint / "model.safetensors", arrays)
    params, config = load_dory(checkpoint)
    assert (params.embedding.dtype, params.logit_scale.dtype) == (jnp.bfloat16, jnp.float32)
    again = save_dory(params, config, checkpoint.parent / "again") / "model.safetensors"
    assert again.read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert len(read_entries(save_dory(params, config, checkpoint.parent / "b", dtype="bfloat16") / again.name)) == 87


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_is_the_inverse_of_import(tmp_path, dtype):
    folder = write_random_dory(tmp_path / "random", CONFIG, dtype=dtype)
    params, config = load_dory(folder)
    out = save_dory(params, config, tmp_path / "out")
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (out / "model.safetensors").stat().st_size == file_bytes(CONFIG, dtype)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir() if "unfinished" in path.name] == []


@pytest.mark.parametrize("changes", [{"prelude": "--S", "core": "**-", "coda": ""}, {"tie_embeddings": True}], ids=str)
def test_other_models_of_the_kind_survive_too(tmp_path, changes):
    config = tiny_dory(**changes)
    params, read = load_dory(write_random_dory(tmp_path / "random", config))
    assert read == config
    again, read = load_dory(save_dory(params, config, tmp_path / "out"))
    assert read == config
    assert_same_bits(again, params)


def test_the_released_model_in_numbers():
    config = presets.dory_4b()
    tensors = slots(config, "released")
    assert len(tensors) == len(slots(config, "transformers")) == len(slots(config, "state_dict")) == 507
    assert sum(math.prod(slot.file_shape) for slot in tensors.values()) == 3_975_229_440
    assert file_bytes(config) == 7_950_515_472
    assert tensors["backbone.layers.71.mixer.down_proj.weight"].file_shape == (2560, 7168)
    assert tensors["backbone.layers.70.mixer.k_proj.weight"].file_shape == (1024, 2560)


def shard(folder, count=3):
    """Cut a checkpoint's file into shards with an index."""
    arrays = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    index = {}
    for number in range(count):
        name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = {key: arrays[key] for key in sorted(arrays)[number::count]}
        write_file(folder / name, part)
        index |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return index


def write_index(folder, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_shards_are_one_checkpoint(checkpoint):
    whole = load_dory(checkpoint)[0]
    shard(checkpoint)
    assert_same_bits(load_dory(checkpoint)[0], whole)


def test_an_index_and_a_folder_that_differ(checkpoint):
    index = shard(checkpoint)
    name = "model-00002-of-00003.safetensors"
    (checkpoint / name).rename(checkpoint / "stray.safetensors")
    refused(checkpoint, f"shard {name} is absent", "stray.safetensors is in no entry of the index")
    (checkpoint / "stray.safetensors").rename(checkpoint / name)
    first, *_ = index
    write_index(checkpoint, index | {first: name, "more": name})
    refused(checkpoint, f"tensor {first} is not in {name}", f"tensor more is not in {name}")
    write_index(checkpoint, {key: value for key, value in index.items() if key != first})
    refused(checkpoint, f"tensor {first} is not in the index")
    write_file(checkpoint / name, tensors_of_shard(checkpoint / name) | {first: np.zeros(3, np.float32)})
    write_index(checkpoint, index)
    refused(checkpoint, f"tensor {first} is in 2 shards")


def tensors_of_shard(path):
    return {name: entry.read() for name, entry in read_entries(path).items()}


def test_a_damaged_shard_or_index(checkpoint):
    shard(checkpoint)
    part = checkpoint / "model-00003-of-00003.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    refused(checkpoint, str(part), "truncated")
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    refused(checkpoint, "no weight_map")
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": ')
    refused(checkpoint, "index.json can't be read")


def test_which_file_is_meant(tmp_path, checkpoint):
    file = checkpoint / "model.safetensors"
    assert_same_bits(load_dory(file)[0], load_dory(checkpoint)[0])
    file.rename(checkpoint / "other.safetensors")
    assert load_dory(checkpoint)[1] == CONFIG
    (checkpoint / "more.safetensors").write_bytes(b"")
    refused(checkpoint, "more.safetensors, other.safetensors and no model.safetensors.index.json")
    assert load_dory(checkpoint / "other.safetensors")[1] == CONFIG
    (checkpoint / "other.safetensors").rename(file)
    (checkpoint / "more.safetensors").unlink()
    write_index(checkpoint, {})
    refused(checkpoint, "holds both")
    refused(checkpoint / "config.json", "is no .safetensors file")
    refused(tmp_path, f"{tmp_path / 'config.json'} is absent")
    refused(tmp_path / "nothing", "does not exist")
    (checkpoint / "model.safetensors.index.json").unlink()
    file.unlink()
    refused(checkpoint, "no .safetensors file")


def test_a_config_that_can_not_be_read(checkpoint):
    (checkpoint / "config.json").write_text("[1]")
    refused(checkpoint, "holds a list and no table")
    (checkpoint / "config.json").write_text("{")
    refused(checkpoint, "config.json can't be read")


def test_all_that_is_wrong_with_the_tensors_is_told_at_once(checkpoint):
    arrays = tensors_of(checkpoint)
    del arrays["backbone.layers.3.mixer.suv_up"], arrays["lm_head.weight"]
    arrays["backbone.layers.12.mixer.sqk"] = np.zeros(3, np.float32)
    arrays["model.layers.0.self_attn.q_proj.weight"] = arrays["backbone.layers.0.mixer.q_proj.weight"]
    arrays["backbone.layers.2.mixer.k_proj.weight"] = np.zeros((32, 16), np.float32)
    write_file(checkpoint / "model.safetensors", arrays)
    refused(
        checkpoint,
        "2 missing: ",
        "backbone.layers.3.mixer.suv_up",
        "lm_head.weight",
        "1 unknown: backbone.layers.12.mixer.sqk;",
        "1 there twice: backbone.layers.0.mixer.q_proj.weight = model.layers.0.self_attn.q_proj.weight;",
        "1 of another shape: backbone.layers.2.mixer.k_proj.weight [32, 16], expected [16, 32]:",
    )


def test_a_config_that_contradicts_the_tensors(tmp_path, checkpoint):
    (checkpoint / "config.json").write_text(json.dumps(dory.to_json(tiny_dory(vocab_size=62, coda="*-S-"))))
    refused(checkpoint, "14 missing", "backbone.layers.12", "lm_head.logit_scale [61], expected [62]")


def test_missing_tensors_are_told_in_the_files_own_naming(tmp_path):
    folder = write_random_dory(tmp_path / "random", CONFIG, layout="state_dict")
    arrays = tensors_of(folder)
    del arrays["model.layers.5.self_attn.gate_proj.weight"]
    write_file(folder / "model.safetensors", arrays)
    refused(folder, "1 missing: model.layers.5.self_attn.gate_proj.weight:")


def test_rotary_buffers_are_passed_over(checkpoint):
    arrays = tensors_of(checkpoint)
    for name in ("inv_freq", "sliding_attention_inv_freq", "full_attention_original_inv_freq"):
        arrays[f"model.rotary_emb.{name}"] = np.zeros(4, np.float32)
    write_file(checkpoint / "model.safetensors", arrays)
    assert load_dory(checkpoint)[1] == CONFIG


def test_a_tied_head_is_absent_or_the_embedding(checkpoint):
    arrays, table = tensors_of(checkpoint), json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(table | {"tie_word_embeddings": True}))
    refused(checkpoint, "unlike the embedding, though the config ties them: lm_head.weight")
    arrays["lm_head.weight"] = arrays["backbone.embeddings.weight"]
    write_file(checkpoint / "model.safetensors", arrays)
    params, config = load_dory(checkpoint)
    assert config.tie_embeddings and params.head is None
    del arrays["lm_head.weight"]
    write_file(checkpoint / "model.safetensors", arrays)
    assert_same_bits(load_dory(checkpoint)[0], params)
    (checkpoint / "config.json").write_text(json.dumps(table))
    refused(checkpoint, "1 missing: lm_head.weight")


def test_options_reach_the_config(checkpoint):
    for reader in (read_config, lambda *args, **options: load_dory(*args, **options)[1]):
        config = reader(checkpoint, max_loops=7, embedding_norm=True)
        assert (config.loop.max_loops, config.sphere.embedding_norm) == (7, True)


def test_one_tensor_is_in_host_memory_at_a_time(tmp_path, monkeypatch):
    """The largest first, and NumPy never holds more than three: as read, the leaf, and one that JAX lets go late."""
    config = tiny_dory(vocab_size=8000, core=20 * "S-", d_model=64, mlp=MLPConfig(d_ff=512))
    folder = write_random_dory(tmp_path / "random", config)
    sizes = sorted((entry.nbytes for entry in read_entries(folder / "model.safetensors").values()), reverse=True)
    put, passed = jax.device_put, []

    def copy(array, placement):  # a CPU device may keep NumPy's memory as its own: that would count
        passed.append((array.nbytes, tracemalloc.get_traced_memory()[1]))
        tracemalloc.reset_peak()
        return put(array, placement).copy()

    monkeypatch.setattr(jax, "device_put", copy)
    load_dory(folder)
    passed.clear()
    tracemalloc.start()
    try:
        load_dory(folder)
    finally:
        tracemalloc.stop()
    assert [size for size, _ in passed] == sizes
    slack = 1 << 20  # names, declarations and other small things
    assert max(peak for _, peak in passed) < 3 * max(sizes) + slack < 0.7 * sum(sizes)


def test_parameters_go_where_they_are_told(tmp_path, checkpoint):
    """Two devices of a process of its own: one sharding for all, a tree of them, and a tree of another shape."""
    code = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from checkpoints_convert import load_dory
from elr_jax.errors import ElrError
mesh = Mesh(np.array(jax.devices()), ("x",))
everywhere = NamedSharding(mesh, P())
plain, config = load_dory(sys.argv[1])
params, _ = load_dory(sys.argv[1], shardings=everywhere)
assert all(leaf.sharding == everywhere for leaf in jax.tree.leaves(params))
tree = jax.tree.map(lambda leaf: NamedSharding(mesh, P("x" if leaf.shape[0] % 2 == 0 else None)), plain)
params, _ = load_dory(sys.argv[1], shardings=tree)
assert params.head.addressable_shards[1].data.shape == (16, 61)
for one, other, sharding in zip(*map(jax.tree.leaves, (params, plain, tree))):
    assert one.sharding == sharding and (np.asarray(one) == np.asarray(other)).all()
try:
    load_dory(sys.argv[1], shardings=(everywhere,))
except ElrError as error:
    assert "another structure" in str(error)
else:
    raise SystemExit("not refused")
"""
    two = {"JAX_NUM_CPU_DEVICES": "2"}
    subprocess.run([sys.executable, "-c", code, str(checkpoint)], env=os.environ | two, check=True)


def test_nothing_is_left_of_a_failed_export(tmp_path, checkpoint, monkeypatch):
    params, config = load_dory(checkpoint)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ElrError, match="is there already"):
        save_dory(params, config, checkpoint)
    with pytest.raises(ElrError, match="is float64: give dtype="):
        save_dory(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params), config, tmp_path / "out")
    with pytest.raises(ElrError, match="no Dory, by its norm_eps"):
        save_dory(params, dataclasses.replace(config, norm_eps=1e-5), tmp_path / "out")

    def full(path, tensors, parts):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dory, "write_tensors", full)
    with pytest.raises(ElrError, match=r"out can't be written .No space left on device"):
        save_dory(params, config, tmp_path / "out")
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: _Usage(10))
    with pytest.raises(ElrError, match=r"needs .* GB and its disk has 0.00"):
        save_dory(params, config, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "out.unfinished").mkdir()
    with pytest.raises(ElrError, match=r"out.unfinished was left behind"):
        save_dory(params, config, tmp_path / "out")


@dataclasses.dataclass
class _Usage:
    free: int


def test_an_empty_folder_may_be_filled(tmp_path, checkpoint):
    (tmp_path / "out").mkdir()
    params, config = load_dory(checkpoint)
    assert load_dory(save_dory(params, config, tmp_path / "out"))[1] == config


def test_a_hub_id_is_downloaded(checkpoint, monkeypatch):
    asked = []

    class Hub:
        @staticmethod
        def snapshot_download(name, *, revision, allow_patterns):
            asked.append((name, revision, "model.safetensors" in allow_patterns, "tokenizer.json" in allow_patterns))
            if name == "no/body":
                raise ConnectionError("no route\nto host")
            return str(checkpoint)

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    assert_same_bits(load_dory("some/body@v1")[0], load_dory(checkpoint)[0])
    load_dory("some/body")
    assert asked == [("some/body", "v1", True, True), ("some/body", None, True, True)]
    refused("no/body", "no/body is no path here and can't be downloaded (ConnectionError: no route to host)")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("some/body", "pip install 'elr-jax[hub]'")


def test_random_checkpoints_look_like_trained_ones(tmp_path):
    config = tiny_dory(d_model=64, vocab_size=300)
    tensors = tensors_of(write_random_dory(tmp_path / "a", config, unit_embedding=False))
    sphere, specs = config.sphere, slots(config, "released")
    for name, x in tensors.items():
        leaf, norms = specs[name].leaf, None
        assert np.unique(x).size > 0.9 * min(x.size, 5000), name
        if leaf.endswith("/rate"):
            rates = np.abs(x * sphere.rate_init / sphere.init_std)
            assert rates.min() >= 0.0199 and rates.max() <= 0.3001 and (x > 0).any() and (x < 0).any()
        elif leaf.endswith(("mixer/output", "mixer/down")):
            norms = np.linalg.norm(x, axis=0)
        elif x.ndim == 2 and leaf != "embedding":
            norms = np.linalg.norm(x, axis=1)
        assert norms is None or np.allclose(norms, 1, atol=1e-5), name
    assert np.std(np.linalg.norm(tensors["backbone.embeddings.weight"], axis=1)) > 0.2
    unit = tensors_of(write_random_dory(tmp_path / "b", config))
    assert np.allclose(np.linalg.norm(unit["backbone.embeddings.weight"], axis=1), 1, atol=1e-5)
    other = tensors_of(write_random_dory(tmp_path / "c", config, seed=1))
    assert not any(np.array_equal(unit[name], other[name]) for name in unit)
    with pytest.raises(ElrError, match=r"no pairs .* use layout 'released'"):
        write_random_dory(tmp_path / "d", tiny_dory(coda="*"), layout="state_dict", dialect="vllm")
