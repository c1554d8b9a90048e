"""Released checkpoints: `dory IN OUT` and `parcae IN OUT` convert one, `verify PATH` holds a Dory to PyTorch."""

import importlib
import sys

import tyro

from elr_jax.errors import one_line_errors

COMMANDS = {
    "dory": ("checkpoints_convert.convert", "Dory", "run"),
    "parcae": ("checkpoints_convert.convert", "Parcae", "run_parcae"),
    "verify": ("checkpoints_convert.verify", "Verify", "run"),
}
"""For each command the module, the dataclass of its settings and the function that takes them."""


def main() -> None:
    """Read the command line, run the command and exit with its status."""
    with one_line_errors():
        modules = {name: importlib.import_module(module) for name, (module, *_) in COMMANDS.items()}
        settings = {name: getattr(modules[name], kind) for name, (_, kind, _) in COMMANDS.items()}
        chosen = tyro.extras.subcommand_cli_from_dict(
            settings, prog="python -m checkpoints_convert", description=__doc__
        )
        (run,) = (
            getattr(modules[name], function)
            for name, (_, _, function) in COMMANDS.items()
            if type(chosen) is settings[name]
        )
        sys.exit(run(chosen))


if __name__ == "__main__":
    main()
