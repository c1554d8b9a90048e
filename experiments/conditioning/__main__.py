"""Conditioning: what telling layers the progress and the budget brings, and which way in matters.

    python -m experiments.conditioning --preset cpu
    python -m experiments.conditioning --report                 the tables and the figure again

A text cell and seed takes 3 to 5 minutes on a quiet core.
`--preset paper` wants an accelerator and `--source DIRECTORY --tokenizer FILE`.
"""

from experiments.comparison import main
from experiments.conditioning.cells import cells
from experiments.conditioning.claims import CLAIMS

if __name__ == "__main__":
    main("conditioning", __doc__, cells, CLAIMS)
