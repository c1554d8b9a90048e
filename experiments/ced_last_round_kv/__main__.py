"""Caches of the last round: lossless after stochastic depth, and after training at one depth alone?

    python -m experiments.ced_last_round_kv --preset cpu
    python -m experiments.ced_last_round_kv --report                 the tables and the figure again

A cell and seed takes about 3 minutes on two quiet cores; those of `ced_loop_placement` are taken over. `--preset paper`
wants accelerators and `--source DIRECTORY --tokenizer FILE`.
"""

from experiments.ced_last_round_kv.cells import cells
from experiments.ced_last_round_kv.claims import CLAIMS, tables
from experiments.comparison import Panel, main

PANELS = [Panel("residuals", "relative change of the state", "round", "log")]

if __name__ == "__main__":
    main("ced_last_round_kv", __doc__, cells, CLAIMS, tables=tables, panels=PANELS)
