"""The command that continues prompts, on eight devices and on one; test_sharding.py runs it in its own process."""

import tempfile

import jax
from cases import perturb
from sharded import MODELS

from elr_jax import parameters
from elr_jax.decode import __main__ as command
from elr_jax.train.runner import save_params


def main() -> None:
    """The same tokens, from parameters that lie in pieces."""
    config = MODELS["gpt"]()
    with tempfile.TemporaryDirectory() as folder:
        save_params(folder, perturb(parameters.init(jax.random.key(0), config), scale=0.5), config)
        asked = {"path": folder, "tokens": ("1,2,3", "4,5,6,7,8", "9", "1,1"), "loops": "1,2", "max_new_tokens": 4}
        mesh = "data=2,fsdp=2,tensor=2"
        params, _, _ = command.open_model(folder, mesh=command.make_mesh(mesh))
        assert params.core[0].mixer.query.addressable_shards[0].data.size * 4 == params.core[0].mixer.query.size
        tables = []
        command.Console = lambda: type("Kept", (), {"print": staticmethod(tables.append)})
        for one in (None, mesh):
            command.run(command.Command(**asked, mesh=one))
        alone, meshed = ([list(column.cells)[:4] for column in table.columns] for table in tables)
        assert alone == meshed, (alone, meshed)


if __name__ == "__main__":
    main()
