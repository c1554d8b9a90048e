"""Elastic depth on text: loss at each loop count of one checkpoint, beside plain models, by law, rule, rate and place.

    python -m experiments.elastic_text --preset cpu
    python -m experiments.elastic_text --preset cpu --only plain per_example --seeds 0

On two quiet cores 2 minutes for a plain cell and seed, 4 for one of mixed depths. Expect 1.91 bits per byte from
`plain`, and `per_example` a few hundredths above it. `--preset paper` wants an accelerator and
`--source DIRECTORY --tokenizer FILE`.
"""

import tyro

from elr_jax.errors import one_line_errors
from experiments.bases import TextFlags
from experiments.elastic_text.cells import cells, size_of
from experiments.elastic_text.report import report
from experiments.sweep import answer

if __name__ == "__main__":
    with one_line_errors():
        flags = tyro.cli(TextFlags, description=__doc__)
        answer("elastic_text", flags, cells(size_of(flags.preset, flags.data)), report)
