"""Elastic text: what its cells hold equal, and that the command runs."""

import pytest

from elr_jax import flops
from elr_jax.train.data import DataConfig
from experiments.elastic_text.cells import cells, size_of, step_flops
from experiments.results import FILE, Results, read_lines


@pytest.fixture(scope="module")
def by_name():
    return {cell.name: cell for cell in cells(size_of("cpu", DataConfig()))}


def test_plain_at_equal_compute_costs_what_the_elastic_run_executes(by_name):
    long, short, elastic = by_name["plain_equal_compute"], by_name["plain"], by_name["per_example"]
    total = lambda cell: cell.recipe.steps * step_flops(cell.recipe, 256)
    assert total(long) == pytest.approx(total(elastic), rel=2e-3)
    assert long.recipe.steps > 1.3 * short.recipe.steps
    assert long.recipe.optim == short.recipe.optim


def test_moving_blocks_changes_no_parameter_count(by_name):
    models = {name: by_name[name].recipe.model for name in ("per_example", "no_prelude", "small_core")}
    parts = {name: [len(part) // 2 for part in (m.prelude, m.core, m.coda)] for name, m in models.items()}
    assert parts == {"per_example": [1, 2, 1], "no_prelude": [0, 2, 2], "small_core": [2, 1, 1]}
    assert len({flops.num_params(model) for model in models.values()}) == 1


def test_the_paper_preset_describes_half_a_billion_parameters():
    size = size_of("paper", DataConfig(source="somewhere", tokenizer="tokenizer.json"))
    assert 0.45e9 < flops.num_params(size.model) < 0.5e9
    assert (size.data.source, size.data.tokenizer, size.data.seq_len) == ("somewhere", "tokenizer.json", 2048)
    assert len(cells(size)) == 22


@pytest.mark.slow
def test_the_command_takes_its_first_steps_and_reports(command, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"document {number} " * 20)
    flags = ("--preset", "smoke", "--seeds", 0, "--runs", tmp_path, "--source", text)
    command("experiments.elastic_text", *flags, "--only", "plain", "per_example")
    folder = tmp_path / "elastic_text" / "smoke"
    results = Results(read_lines(folder / FILE), "smoke")
    assert results.values("per_example", "bits_per_byte").shape == (1, 4)
    assert results.values("plain", "bits_per_byte").shape == (1, 1)
    assert (folder / "figures" / "smoke.png").stat().st_size > 10_000
    assert "| per_example | " in (folder / "README.md").read_text()
    (folder / "README.md").unlink()
    command("experiments.elastic_text", *flags, "--report")
    assert "| plain | " in (folder / "README.md").read_text()
