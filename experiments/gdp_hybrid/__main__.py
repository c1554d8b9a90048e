"""Elastic depth on Koi's layers: Gated DeltaProduct states instead of most attention, at 1 to 4 loops.

    python -m experiments.gdp_hybrid --preset cpu
    python -m experiments.gdp_hybrid --report                 the tables and the figure again

A cell and seed takes 2 to 6 minutes on a quiet core. `--preset paper` trains Koi-4B's configuration: it wants
accelerators and `--source DIRECTORY --tokenizer FILE`.
"""

from experiments.comparison import main
from experiments.gdp_hybrid.cells import cells
from experiments.gdp_hybrid.claims import CLAIMS

if __name__ == "__main__":
    main("gdp_hybrid", __doc__, cells, CLAIMS)
