"""Where to loop: dense stacks, the causal encoder-decoder's encoder or decoder, and YOCO-U, beside each run once.

    python -m experiments.ced_loop_placement --preset cpu
    python -m experiments.ced_loop_placement --report                 the tables and the figure again

A looped cell and seed takes about 3 minutes on two quiet cores. `--preset paper` wants accelerators and
`--source DIRECTORY --tokenizer FILE`.
"""

from experiments.ced_loop_placement.cells import cells
from experiments.ced_loop_placement.claims import CLAIMS, tables
from experiments.comparison import Panel, main

PANELS = [Panel("bits_by_position", "bits per byte", "position, in eighths of a training context")]

if __name__ == "__main__":
    main("ced_loop_placement", __doc__, cells, CLAIMS, tables=tables, panels=PANELS)
