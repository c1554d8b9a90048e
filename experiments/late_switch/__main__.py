"""Late switch: mixing depths from 0, 25, 50 or 75 % of the steps on, with conditioning grafted then.

    python -m experiments.late_switch --preset cpu
    python -m experiments.late_switch --report                 the tables and the figure again

A text cell and seed takes 2 to 5 minutes on a quiet core.
`--preset paper` wants an accelerator and `--source DIRECTORY --tokenizer FILE`.
"""

from experiments.comparison import main
from experiments.late_switch.cells import cells
from experiments.late_switch.claims import CLAIMS

if __name__ == "__main__":
    main("late_switch", __doc__, cells, CLAIMS)
