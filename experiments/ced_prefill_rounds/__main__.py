"""Prompts of fewer rounds: what reading the first half of a row in T rounds costs its second half, read in K.

    python -m experiments.ced_prefill_rounds --preset cpu
    python -m experiments.ced_prefill_rounds --report                 the tables and the figure again

All cells are those of `ced_loop_placement` and taken over from there; alone, a looped one takes about 3 minutes on
two quiet cores. `--preset paper` wants accelerators and `--source DIRECTORY --tokenizer FILE`.
"""

from experiments.ced_prefill_rounds.cells import cells
from experiments.ced_prefill_rounds.claims import CLAIMS, tables
from experiments.comparison import Panel, main

PANELS = [Panel("prefill_bits", "bits per byte of the second half", "rounds of the first half")]

if __name__ == "__main__":
    main("ced_prefill_rounds", __doc__, cells, CLAIMS, tables=tables, panels=PANELS)
