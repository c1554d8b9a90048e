"""Released checkpoints: `python -m checkpoints_convert dory IN OUT` converts one, `verify PATH` holds it to PyTorch."""

import importlib
import sys

import tyro

from elr_jax.errors import one_line_errors

COMMANDS = {"dory": ("checkpoints_convert.convert", "Dory"), "verify": ("checkpoints_convert.verify", "Verify")}
"""For each command the module and the dataclass of its settings; the module's `run` takes them."""


def main() -> None:
    """Read the command line, run the command and exit with its status."""
    with one_line_errors():
        modules = {name: importlib.import_module(module) for name, (module, _) in COMMANDS.items()}
        settings = {name: getattr(modules[name], kind) for name, (_, kind) in COMMANDS.items()}
        chosen = tyro.extras.subcommand_cli_from_dict(
            settings, prog="python -m checkpoints_convert", description=__doc__
        )
        (run,) = (modules[name].run for name, kind in settings.items() if type(chosen) is kind)
        sys.exit(run(chosen))


if __name__ == "__main__":
    main()
