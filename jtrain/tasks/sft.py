"""Supervised fine-tuning: the tokens of answers, given what stands before them."""

from __future__ import annotations

from typing import Any

from jtrain.config.schema import Config
from jtrain.data.chat import load_chat_template
from jtrain.data.rows import EvalRows, TrainRows
from jtrain.data.sft import counts
from jtrain.tasks.eval_text import ComputeTextMetrics
from jtrain.tasks.held_out_answers import HeldOutAnswers
from jtrain.tasks.image_models import describe_images
from jtrain.tasks.language import LanguageTrainer, eval_sources, records_of
from jtrain.tasks.language_loss import next_token_loss
from jtrain.tasks.text_scores import check_metrics
from jtrain.train.loss import LossFn


class SFTTrainer(LanguageTrainer):
    """Fine-tunes a decoder on examples.

    Records are conversations (`messages`), prompts with completions, or texts; the form is found by their fields (see
    `jtrain/data/conversations.py`). The other arguments are `LanguageTrainer`'s; without a config the defaults are
    TRL's (`jtrain/config/task_defaults.py`).

    Logged beside the figures of every run, with TRL's names: `entropy`, `mean_token_accuracy` (means over the learned
    tokens), `num_tokens` (all so far, without padding), and `packing_efficiency`. With `eval.metrics`, evaluations have
    scores of the model's answers to held-out prompts besides.

    Args:
      compute_text_metrics: a metric of one's own, `function(predictions, references, **columns) -> name -> number`: the
        answers to `eval.metric_examples` held-out prompts, those of the data, and the records' fields, a list each.
    """

    task = "sft"
    reads_images = True

    def __init__(self, *args: Any, compute_text_metrics: ComputeTextMetrics | None = None, **keywords: Any):
        self._sources: list[Any] = []
        super().__init__(*args, **keywords)
        self._answers = HeldOutAnswers(self, compute_text_metrics)
        if self._answers.wanted:
            self._answers.open(self._sources)

    def make_loss(self, config: Config) -> LossFn:
        loss = config.loss
        return next_token_loss(
            loss.label_smoothing,
            loss.z_loss,
            loss.chunk_size,
            entropy=True,
            packing_efficiency=True,
            noise_alpha=config.sft.neftune_noise_alpha,
        )

    def read_data(self, config: Config, train: Any, held_out: Any) -> tuple[Any, Any]:
        if config.data.chat_template is not None:  # what `generate` is to prompt with as well
            template = load_chat_template(self.tokenizer, config.data.chat_template)
            self.tokenizer.chat_templates = {**self.tokenizer.chat_templates, "default": template.source}
        check_metrics(config.eval.metrics)
        self._sources = eval_sources(config, train, held_out)
        return super().read_data(config, train, held_out)

    def more_figures(self, data: Any) -> dict[str, float]:
        if not self._answers.wanted:
            return {}
        return self._answers.figures(data, None if data is None else records_of(data))

    def summary(self) -> list[str]:
        lines = [*super().summary(), *(f"{name}: {line}" for name, line in self._examples())]
        if self.decoder.images is not None:
            lines.append(f"images: {describe_images(self.decoder, self.config.optimizer.freeze)}")
        return lines

    def log(self, split: str, record: dict[str, Any]) -> None:
        more = {"num_tokens": self.counters.tokens} if split == "train" else {}
        super().log(split, record | more)

    def _examples(self) -> list[tuple[str, str]]:
        """What every source holds, in words."""
        lines = []
        for split, rows in (("train", self.train_rows), ("eval", self.eval_rows)):
            rows = getattr(rows, "plain", rows)  # with something beside them
            if not isinstance(rows, TrainRows | EvalRows):
                continue
            for source in rows.sources:
                number = counts(source)
                text = f"{number['examples']:,} examples ({source.title}) in {len(source):,} rows"
                if number["left_out"]:
                    text += f", {number['left_out']:,} without a token to learn left out"
                if number["cut"]:
                    text += f", {number['cut']:,} longer than max_length"
                lines.append((split, text))
        return lines
