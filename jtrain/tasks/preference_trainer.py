"""What trainers of preferences have in common: no dropout, and sources that leave records out."""

from __future__ import annotations

from typing import Any, ClassVar

from jtrain.config.schema import Config
from jtrain.data.pairs import PairRows, SingleRows
from jtrain.data.rows import EvalRows, TrainRows
from jtrain.tasks.language import LanguageTrainer


class PreferenceTrainer(LanguageTrainer):
    """A trainer on rows of `jtrain/data/pairs.py`; the arguments are `LanguageTrainer`'s."""

    left_out: ClassVar[str]
    """Which records a source leaves out, in the summary's words."""

    def __init__(self, *args: Any, **keywords: Any):
        self._sources: list[tuple[str, PairRows | SingleRows]] = []
        super().__init__(*args, **keywords)

    def settle(self, config: Config) -> Config:
        """Without dropout, which would make a policy that equals its reference differ from it."""
        model, section = config.model, getattr(config, config.task)
        if not section.disable_dropout or not (model.dropout or model.lora.dropout):
            return config
        model = model.model_copy(update={"dropout": 0.0, "lora": model.lora.model_copy(update={"dropout": 0.0})})
        return config.model_copy(update={"model": model})

    def read_data(self, config: Config, train: Any, held_out: Any) -> tuple[Any, Any]:
        found = super().read_data(config, train, held_out)
        for name, rows in zip(("train", "eval"), found, strict=True):
            sources = rows.sources if isinstance(rows, TrainRows | EvalRows) else ()
            self._sources += [(name, source) for source in sources if isinstance(source, PairRows | SingleRows)]
        return found

    def source_lines(self) -> list[str]:
        """Lines of the summary about the sources."""
        return [
            f"{name}: {len(source):,} rows ({source.title})"
            + (f", {source.dropped:,} {self.left_out} left out" if source.dropped else "")
            for name, source in self._sources
        ]

    def log(self, split: str, record: dict[str, Any]) -> None:
        super().log(split, record | ({"num_tokens": self.counters.tokens} if split == "train" else {}))
