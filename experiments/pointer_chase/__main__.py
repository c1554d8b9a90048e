"""Pointer chase: accuracy by hops and loops of one mixed-depth model, two specialists and a plain model.

    python -m experiments.pointer_chase --preset cpu

About 200 s a cell and seed on two quiet cores, 12 in all. Expect the mixed model to solve h hops at h loops, to gain
with every loop and still to be right at 5 and 6 loops, which it never trained at; the models of one depth are good at
that depth alone.
"""

import tyro

from elr_jax.errors import one_line_errors
from experiments.pointer_chase.cells import cells
from experiments.pointer_chase.report import report
from experiments.sweep import Flags, answer

if __name__ == "__main__":
    with one_line_errors():
        flags = tyro.cli(Flags, description=__doc__)
        answer("pointer_chase", flags, cells(flags.preset), report)
