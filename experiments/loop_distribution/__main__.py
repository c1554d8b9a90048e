"""Loop distribution: which loop counts training needs, and what the third and fourth are for.

    python -m experiments.loop_distribution --preset cpu
    python -m experiments.loop_distribution --report                 the tables and the figure again

A text cell and seed takes 2 to 5 minutes on a quiet core.
`--preset paper` wants an accelerator and `--source DIRECTORY --tokenizer FILE`.
"""

from experiments.comparison import main
from experiments.loop_distribution.cells import cells
from experiments.loop_distribution.claims import CLAIMS

if __name__ == "__main__":
    main("loop_distribution", __doc__, cells, CLAIMS)
