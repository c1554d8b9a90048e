"""The index is made from claims and results files, and keeps what people wrote around it."""

from elr_jax.sections import write_section
from experiments.index import main, write_index
from experiments.results import Claim, Results


def result(cell, loss):
    shared = {"preset": "cpu", "seed": 0, "digest": "a", "seconds": 1800.0, "device": "1 cpu, 2 cores"}
    return shared | {"cell": cell, "metrics": {"loss": loss}}


def test_claims_stand_beside_our_numbers(tmp_path):
    claims = (
        Claim(claim="falls", source="2 → 1", ours=lambda r: f"{r.mean('mixed', 'loss')[1]:.2f}", verdict="worked"),
        Claim(claim="absent", source="3", ours=lambda r: str(r.mean("other", "loss")), verdict="worked"),
    )
    path = tmp_path / "README.md"
    write_index(path, {"chase": claims}, {"chase": Results([result("mixed", [2.0, 1.25])], "cpu")})
    rows = [row for row in path.read_text().splitlines() if row.startswith("| [chase]")]
    end = "0.5 h on 1 cpu, 2 cores | `python -m experiments.chase` |"
    assert rows == [
        f"| [chase](chase/README.md) | falls | 2 → 1 | 1.25 | worked | {end}",
        f"| [chase](chase/README.md) | absent | 3 | – | not evaluated | {end}",
    ]


def test_a_section_is_replaced_and_its_surroundings_stay(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("# Title\n\n<!-- cpu -->\nold\n<!-- /cpu -->\n\nVerdict: mine.\n")
    write_section(path, "cpu", "new")
    write_section(path, "paper", "more")
    assert path.read_text() == (
        "# Title\n\n<!-- cpu -->\nnew\n<!-- /cpu -->\n\nVerdict: mine.\n\n<!-- paper -->\nmore\n<!-- /paper -->\n"
    )


def test_every_experiment_that_makes_claims_is_listed(tmp_path):
    for name in ("pointer_chase", "elastic_text"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "claims.py").touch()
    main(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "[pointer_chase](pointer_chase/README.md)" in text
    assert "[elastic_text](elastic_text/README.md)" in text
