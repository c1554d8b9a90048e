"""What a cell trains on and is measured by."""

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from elr_jax.config import ModelConfig
from elr_jax.parameters import Params
from elr_jax.train.data import DataConfig, Dataset, open_dataset
from elr_jax.train.token_store import Split


class Task(Protocol):
    """Data of both splits, and what is measured beyond the scores at each loop count."""

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides the data, JSON-ready."""
        ...

    def open(self, split: Split, *, seed: int) -> Dataset:
        """Examples of one split."""
        ...

    def measure(self, params: Params, config: ModelConfig) -> dict[str, Any]:
        """More metrics of trained parameters: numbers or nested lists of them."""
        ...


@dataclass(frozen=True, kw_only=True)
class Text:
    """Next-token prediction on packed text."""

    data: DataConfig = field(default_factory=DataConfig)

    @property
    def settings(self) -> dict[str, Any]:
        """The data's settings; where tokens are cached decides nothing."""
        return {name: value for name, value in asdict(self.data).items() if name != "cache_dir"}

    def open(self, split: Split, *, seed: int) -> Dataset:
        """Packed windows of one split."""
        return open_dataset(self.data, split, seed=seed)

    def measure(self, params: Params, config: ModelConfig) -> dict[str, Any]:
        """Nothing beyond the loss."""
        return {}
