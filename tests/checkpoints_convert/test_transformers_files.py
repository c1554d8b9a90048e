"""The same checkpoints in transformers: its own saves are read, and what is exported it loads bit for bit."""

import json

import numpy as np
import pytest
from cases import assert_same_bits, tiny_dory

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")
safetensors_torch = pytest.importorskip("safetensors.torch")

from checkpoints_convert import load_dory, save_dory  # noqa: E402
from checkpoints_convert.dory_config import to_json  # noqa: E402
from checkpoints_convert.dory_rules import LAYOUTS, slots  # noqa: E402
from checkpoints_convert.random_dory import write_random_dory  # noqa: E402
from checkpoints_convert.tensor_file import read_entries  # noqa: E402

pytestmark = pytest.mark.parity
CONFIG = tiny_dory()


def torch_load(folder, dtype=torch.float32):
    model, info = transformers.DoryForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    return model


def bits(model):
    kind = {4: torch.int32, 2: torch.int16}
    return {name: x.contiguous().view(kind[x.element_size()]).numpy() for name, x in model.state_dict().items()}


def same(one, other):
    one, other = bits(one), bits(other)
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture
def checkpoint(tmp_path):
    return write_random_dory(tmp_path / "random", CONFIG)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_own_saves_come_through(tmp_path, dtype):
    """transformers' save → parameters → export → transformers: bit for bit, and by the state dict's names."""
    theirs = torch_load(write_random_dory(tmp_path / "random", CONFIG, dtype=dtype), getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "saved")
    assert read_entries(tmp_path / "saved" / "model.safetensors").keys() == slots(CONFIG, "transformers").keys()
    params, config = load_dory(tmp_path / "saved")
    assert config == CONFIG
    assert same(torch_load(save_dory(params, config, tmp_path / "out"), getattr(torch, dtype)), theirs)
    assert theirs.state_dict().keys() == slots(CONFIG, "state_dict").keys()
    tensors = {name: x.contiguous() for name, x in theirs.state_dict().items()}
    safetensors_torch.save_file(tensors, tmp_path / "saved" / "model.safetensors")
    assert_same_bits(load_dory(tmp_path / "saved")[0], params)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_random_checkpoints_are_its_own(tmp_path, checkpoint, layout):
    other = write_random_dory(tmp_path / layout, CONFIG, layout=layout, dialect="transformers")
    assert same(torch_load(other), torch_load(checkpoint))


def test_shards_that_it_saves(tmp_path, checkpoint):
    torch_load(checkpoint).save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    assert_same_bits(load_dory(tmp_path / "saved")[0], load_dory(checkpoint)[0])


def test_a_tied_head(tmp_path):
    config = tiny_dory(tie_embeddings=True)
    model = torch_load(write_random_dory(tmp_path / "random", config))
    model.save_pretrained(tmp_path / "saved")
    params, read = load_dory(tmp_path / "saved")
    assert read == config and params.head is None
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert np.array_equal(params.embedding, model.lm_head.weight.detach().numpy())


@pytest.mark.parametrize("dialect", ["both", "transformers"])
def test_it_reads_the_config_as_meant(tmp_path, dialect):
    """The union's further keys change nothing: bases, window, splits, standard deviation."""
    config = tiny_dory(attention=tiny_dory().attention, max_positions=99)
    (tmp_path / "config.json").write_text(json.dumps(to_json(config, dialect=dialect)))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (read.num_hidden_layers, read.n_input_layers, read.n_recurrent_layers, read.n_output_layers) == (6, 2, 3, 1)
    assert "".join({"sliding_attention": "S", "full_attention": "*"}[kind] for kind in read.layer_types) == "S*SS**"
    bases = {kind: value["rope_theta"] for kind, value in read.rope_parameters.items() if kind.endswith("attention")}
    assert bases == {"sliding_attention": 1e4, "full_attention": 1e7}
    assert (read.sliding_window, read.head_dim, read.max_position_embeddings) == (5, 8, 99)
    assert (read.initializer_range, read.ngpt_alpha_init, read.n_recurrent_loops) == (0.0177, 0.05, 2)
