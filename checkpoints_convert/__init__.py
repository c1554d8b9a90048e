"""Released checkpoints into this project's parameters and back; `python -m checkpoints_convert --help`."""

from checkpoints_convert.dory import file_bytes, load_dory, read_config, save_dory
from checkpoints_convert.parcae import load_parcae

__all__ = ["file_bytes", "load_dory", "load_parcae", "read_config", "save_dory"]
