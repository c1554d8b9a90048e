"""Fixed against mixed: models of one loop count, evaluated at all, beside one trained at all.

    python -m experiments.fixed_vs_mixed --preset cpu
    python -m experiments.fixed_vs_mixed --report                 the tables and the figure again

A text cell and seed takes 2 to 5 minutes on a quiet core. Expect specialists to win at home and to lose away.
`--preset paper` wants an accelerator and `--source DIRECTORY --tokenizer FILE`.
"""

from experiments.comparison import main
from experiments.fixed_vs_mixed.cells import cells
from experiments.fixed_vs_mixed.claims import CLAIMS

if __name__ == "__main__":
    main("fixed_vs_mixed", __doc__, cells, CLAIMS)
