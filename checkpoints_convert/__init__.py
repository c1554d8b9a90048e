"""Released checkpoints into this project's parameters and back; `python -m checkpoints_convert --help`."""

from checkpoints_convert.dory import file_bytes, load_dory, read_config, save_dory

__all__ = ["file_bytes", "load_dory", "read_config", "save_dory"]
