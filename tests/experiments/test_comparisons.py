"""The questions that compare variants: what their cells hold equal, and that their commands run."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elr_jax import parameters
from elr_jax.config import LoopRule
from elr_jax.depth import Fixed
from elr_jax.presets import elr_30b_a3b, koi_4b
from elr_jax.train.data import Batch, DataConfig
from experiments.bases import references
from experiments.elastic_text.cells import cells as elastic_cells
from experiments.elastic_text.cells import size_of
from experiments.looped_text import cache_losses, copy_gains, motion, position_losses, prefill_losses
from experiments.pointer_chase.cells import cells as chase_cells
from experiments.results import FILE, Results, read_lines
from experiments.sweep import ROOT
from experiments.tasks import cosines, overlaps

RECIPES = ("update_rules", "loop_sampling", "fixed_vs_mixed", "conditioning", "late_switch", "loop_distribution")
"""Questions on the shared text and the pointer chase."""
LOOPED = ("ced_loop_placement", "ced_last_round_kv", "ced_prefill_rounds", "ced_recall")
QUESTIONS = (*RECIPES, "gdp_hybrid", "route_replay", *LOOPED)


METRICS = (
    "bits_per_byte",
    "accuracy",
    "overlap",
    "cosine",
    "switch_cost",
    "prefill_bits",
    "cache_bits",
    "residuals",
    "copy_gain",
    "bits_by_position",
)
NUMBERS = ("replay_time", "contraction", "settled", "cycling")


def cells_of(question, preset="cpu"):
    module = importlib.import_module(f"experiments.{question}.cells")
    return {cell.name: cell for cell in module.cells(references(preset, DataConfig()))}


@pytest.mark.parametrize("question", QUESTIONS)
def test_variants_share_everything_but_what_they_ask(question):
    """Data, steps, batch and optimizer are the reference's; only model and law of the loop count may differ.

    What a model without conditioning has no use for, the rate of conditioning, may differ too.
    """
    reference = references("cpu", DataConfig())
    cells = cells_of(question)
    assert len({cell.digest for cell in cells.values()}) == len(cells), "two cells of one recipe"
    for name, cell in cells.items():
        base = reference[name.split("_")[0]]
        rate = base.recipe.optim.condition_lr_scale
        optim = dataclasses.replace(cell.recipe.optim, condition_lr_scale=rate)
        same = dataclasses.replace(cell.recipe, model=base.recipe.model, depth=base.recipe.depth, optim=optim)
        if cell.recipe.depth == Fixed(loops=1):  # of one round nothing is left out
            same = dataclasses.replace(same, backprop_loops=base.recipe.backprop_loops)
        assert same == base.recipe and cell.task == base.task, name
    assert any(cell.headline for cell in cells.values())


@pytest.mark.parametrize("question", RECIPES)
def test_baselines_are_those_of_the_first_experiments(question):
    """So that finished runs are taken over."""
    known = {cell.digest: cell.name for cell in elastic_cells(size_of("cpu", DataConfig())) + chase_cells("cpu")}
    shared = {name: known[cell.digest] for name, cell in cells_of(question).items() if cell.digest in known}
    assert (
        shared["text_plain"] == "plain" and {"per_example", "mixed"} & set(shared.values())
    ) or question == "late_switch"


@pytest.mark.parametrize("question", RECIPES)
def test_the_paper_preset_reaches_its_own_loop_counts(question):
    """Nothing of the small preset's four loops is left in the cells of a model of five."""
    cells = cells_of(question, "paper")
    most = references("paper", DataConfig())["text"].recipe.depth.max_loops
    assert most == 5
    deepest = {name: cell.recipe.depth.max_loops for name, cell in cells.items() if name.startswith("text")}
    assert most in deepest.values() and set(deepest.values()) <= set(range(1, most + 1))
    if question == "fixed_vs_mixed":
        assert {deepest[f"text_fixed_{k}"] for k in range(1, most + 1)} == set(range(1, most + 1))
    if question in ("conditioning", "late_switch"):
        widths = {
            name: cell.recipe.model.conditioning.width for name, cell in cells.items() if cell.recipe.model.conditioning
        }
        assert {width for name, width in widths.items() if name.startswith("text")} == {256}
    if question == "loop_distribution":
        for name in ("shallow", "deep", "one_two", "ends"):
            assert len(cells[f"text_{name}"].recipe.depth.probabilities) == most


@pytest.mark.parametrize("question", QUESTIONS)
def test_claims_read_the_cells_there_are(question):
    """Every claim can be judged once all cells have a result, and names no other cell."""
    cells = cells_of(question)
    cost = {"train_flops": 2.0, "useful_rounds": 2.0, "executed_rounds": 2.5}
    lines = []
    for seed in (0, 1):
        for name, cell in cells.items():
            loops = cell.recipe.model.loop.max_loops
            metrics = {metric: [2.0 + seed - 0.1 * k for k in range(max(loops, 4))] for metric in METRICS}
            metrics |= {"bits_per_byte": metrics["bits_per_byte"][:loops], **dict.fromkeys(NUMBERS, 0.9)}
            lines.append({"preset": "cpu", "cell": name, "seed": seed, "digest": "", "metrics": metrics, **cost})
    results = Results(lines, "cpu")
    claims = importlib.import_module(f"experiments.{question}.claims").CLAIMS
    for claim in claims:
        assert claim.ours(results) and "nan" not in claim.ours(results)
        assert claim.judge(Results([], "cpu")) == ("–", "not evaluated")


@pytest.mark.parametrize(
    "question, cell",
    [
        ("late_switch", "text_after_50"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("update_rules", "text_delta"),
                ("loop_sampling", "text_slice"),
                ("fixed_vs_mixed", "text_fixed_2"),
                ("conditioning", "text_no_low_rank"),
                ("loop_distribution", "chase_ends"),
                ("gdp_hybrid", "hybrid_elastic"),
                ("route_replay", "moe_replay"),
                ("ced_last_round_kv", "ced_encoder_loop_fixed"),
                ("ced_recall", "ced_yoco_loop"),
            )
        ),
    ],
)
def test_the_commands_take_their_first_steps_and_report(question, cell, command, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"document {number} " * 20)
    flags = ("--preset", "smoke", "--seeds", 0, "--runs", tmp_path, "--source", text)
    command(f"experiments.{question}", *flags, "--only", cell)
    folder = tmp_path / question / "smoke"
    metric = "accuracy" if cell.startswith("chase") else "bits_per_byte"
    assert Results(read_lines(folder / FILE), "smoke").values(cell, metric).shape[0] == 1
    assert (folder / "figures" / "smoke.png").stat().st_size > 10_000
    assert f"| {cell} | " in (folder / "README.md").read_text()


def test_the_paper_preset_of_the_own_backbones_is_their_full_size():
    models = {cell.recipe.model for question in ("gdp_hybrid", "route_replay") for cell in paper_cells(question)}
    assert {model.layers for model in models} == {koi_4b().layers, elr_30b_a3b().layers}
    assert {model.d_model for model in models} == {3072, 2688}


def paper_cells(question):
    return cells_of(question, "paper").values()


@pytest.mark.slow
def test_routes_are_measured_on_the_core_alone():
    """A first round keeps its own routes; routes that never change keep everything, at no cost of a switch."""
    cell = cells_of("route_replay", "smoke")["moe_fresh"]
    model = cell.recipe.model
    params = parameters.init(jax.random.key(0), model)
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 257)
    ones = jnp.ones(tokens.shape)
    batch = Batch(tokens=tokens, targets=tokens, weights=ones, segment_ids=ones.astype(jnp.int32))
    kept = overlaps(params, batch, config=model)
    assert kept.shape == (model.loop.max_loops,) and kept[0] == 1 and (kept[1:] < 1).all()
    replayed = dataclasses.replace(model, moe=dataclasses.replace(model.moe, replay=True))
    near = cosines(params, batch, config=replayed)
    np.testing.assert_allclose(near[0], 1, atol=1e-5)
    assert (near[1:] < 0.9999).all()
    bias = lambda layer: dataclasses.replace(layer.mixer, bias=jnp.arange(8.0) * 9)  # routes by number alone
    core = tuple(
        dataclasses.replace(layer, mixer=bias(layer)) if letter == "E" else layer
        for letter, layer in zip(model.core, params.core, strict=True)
    )
    same = dataclasses.replace(params, core=core)
    np.testing.assert_array_equal(overlaps(same, batch, config=model), 1)
    np.testing.assert_allclose(cosines(same, batch, config=replayed), 1, atol=1e-5)


def test_measures_of_a_loop_that_does_nothing():
    """A core whose state stays where it is has settled, and no cache or prompt makes a difference to it."""
    cell = cells_of("ced_last_round_kv", "smoke")["ced_encoder_loop"]
    loop = LoopRule(initial="copy", update="delta", max_loops=4)
    model = dataclasses.replace(cell.recipe.model, loop=loop)
    params = parameters.init(jax.random.key(0), model)
    still = dataclasses.replace(params, loop=jax.tree.map(jnp.zeros_like, params.loop))
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 257)
    ones = jnp.ones(tokens.shape)
    batch = Batch(tokens=tokens, targets=tokens, weights=ones, segment_ids=ones.astype(jnp.int32))
    key = jax.random.key(2)
    cached = cache_losses(still, batch, key, config=model, chunk=4)
    np.testing.assert_allclose(cached[0], cached[1], rtol=1e-5)
    prefilled = prefill_losses(still, batch, key, config=model, chunk=4)
    np.testing.assert_allclose(prefilled, prefilled[0], rtol=1e-5)
    longer = dataclasses.replace(model, loop=dataclasses.replace(model.loop, max_loops=16))
    settled, cycling, _, *residuals = motion(still, batch, key, config=longer)
    assert (settled, cycling) == (1, 0) and len(residuals) == 16 and not np.any(residuals)
    gains = copy_gains(still, batch, key, config=model, copied=4)
    assert gains.shape == (3,) and np.isfinite(gains).all()
    loss, weight = position_losses(still, batch, key, config=model)
    assert loss.shape == weight.shape == (16,) and weight[0] == 2


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_has_its_folder_in_order(question):
    """A README that says what was asked, and results of cells that exist."""
    readme = (ROOT / question / "README.md").read_text()
    assert "**Question.**" in readme and "**Verdict" in readme and f"experiments.{question}" in readme
    names = {line["cell"] for line in read_lines(ROOT / question / FILE)}
    assert names <= set(cells_of(question))
