"""Copies: what a passage that was read before saves on its repetition, by distance and by the place of the loop.

    python -m experiments.ced_recall --preset cpu
    python -m experiments.ced_recall --report                 the tables and the figure again

The cells are those of `ced_loop_placement` and taken over from there. `--preset paper` wants accelerators and
`--source DIRECTORY --tokenizer FILE`.
"""

from experiments.ced_recall.cells import cells
from experiments.ced_recall.claims import CLAIMS, tables
from experiments.comparison import Panel, main

PANELS = [Panel("copy_gain", "bits per byte saved on a copy", "distance, in lengths of the passage")]

if __name__ == "__main__":
    main("ced_recall", __doc__, cells, CLAIMS, tables=tables, panels=PANELS)
