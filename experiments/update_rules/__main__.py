"""Update rules: replace, residual, delta and adaptive delta beside a plain model, at every loop count.

    python -m experiments.update_rules --preset cpu
    python -m experiments.update_rules --report                 the tables and the figure again

A text cell and seed takes 2 to 4 minutes on a quiet core, a pointer chase as long; baselines that another experiment
has finished are taken over. Expect all rules to stand above the plain model at one loop.
`--preset paper` wants an accelerator and `--source DIRECTORY --tokenizer FILE`.
"""

from experiments.comparison import main
from experiments.update_rules.cells import cells
from experiments.update_rules.claims import CLAIMS

if __name__ == "__main__":
    main("update_rules", __doc__, cells, CLAIMS)
