"""Route replay: what a loop loses, and saves, when later rounds keep the first one's experts.

    python -m experiments.route_replay --preset cpu
    python -m experiments.route_replay --report                 the tables and the figure again

A cell and seed takes 4 to 9 minutes on a quiet core: on CPUs a grouped product runs every expert on every token.
Expect no time saved there: choosing among 8 experts costs next to nothing. `--preset paper` trains the 30B-A3B's
configuration: it wants accelerators and `--source DIRECTORY --tokenizer FILE`.
"""

from experiments.comparison import main
from experiments.route_replay.cells import cells
from experiments.route_replay.claims import CLAIMS, tables

if __name__ == "__main__":
    main("route_replay", __doc__, cells, CLAIMS, tables=tables)
