"""Loop sampling: who shares a draw of the loop count, and what that does to the one-loop loss.

    python -m experiments.loop_sampling --preset cpu
    python -m experiments.loop_sampling --report                 the tables and the figure again

A text cell and seed takes 2 to 4 minutes on a quiet core. Expect one draw a step to stand above draws for each row.
`--preset paper` wants an accelerator and `--source DIRECTORY --tokenizer FILE`.
"""

from experiments.comparison import main
from experiments.loop_sampling.cells import cells
from experiments.loop_sampling.claims import CLAIMS

if __name__ == "__main__":
    main("loop_sampling", __doc__, cells, CLAIMS)
