"""Our models under lm-eval (EleutherAI's evaluation harness): `TemplateLM` over a loaded model.

Requests are sorted by their lengths, padded to few lengths (few programs are compiled), divided over the mesh, and
given back in their order. Tokens, windows and truncation are those of lm-eval's own class for Hugging Face's models, so
that the figures are the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from jtrain.data.chat import ChatTemplate, load_chat_template
from jtrain.data.rows import IGNORE, Batch
from jtrain.errors import ConfigError
from jtrain.ops.token_scores import token_scores
from jtrain.parallel.mesh import data_ranks
from jtrain.tasks.eval_reading import tokenizer_of
from jtrain.tasks.eval_text import generate_sorted
from jtrain.tasks.generate import generate
from jtrain.tasks.generation_request import rounded_length
from jtrain.tasks.language_loss import logit_cap
from jtrain.tasks.loaded import LoadedModel
from jtrain.train.evaluation import FilledRows
from jtrain.train.prediction import first_micro_batch, outputs_of

MAX_NEW_TOKENS = 256
"""Of a generation whose task does not say it; lm-eval's own default."""

_OF_SAMPLING = ("top_k", "top_p", "min_p")
_IDLE = ("do_sample", "max_length", "num_return_sequences", "pad_token_id", "use_cache")

Request = tuple[Any, list[int], list[int]]
"""(what it is called, tokens of the context, tokens that are scored)."""


class JtrainLM(TemplateLM):
    """A loaded model for `lm_eval.simple_evaluate(model=...)`.

    Args:
      model: from `load_model`.
      batch_size: requests that are computed together, over all devices.
      max_length: the most tokens of a request; by default what the model takes.
      chat_template: one of the model's templates by name, or a .jinja file; by default the usual one. It is used where
        lm-eval is asked to (`apply_chat_template`).

    Raises:
      ConfigError: the model has no tokenizer, or does not take so many tokens.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        chat_template: str | None = None,
    ):
        super().__init__()
        self._model, self._tokenizer = model, tokenizer_of(model)
        limit = model.decoder.max_position_embeddings
        self.max_length = max_length or limit
        if self.max_length > limit:
            raise ConfigError(f"max_length={max_length}, and the model takes {limit} tokens", f"write {limit} or less")
        self.batch_size = batch_size
        self._named_template = chat_template
        self._template: ChatTemplate | None = None
        self._scores = model.jit(first_micro_batch(continuation_scores), name="continuation_scores")

    # -- tokens -------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The end token; where there is none, what else may stand at an end."""
        tokenizer = self._tokenizer
        known = (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id)
        return next(token for token in known if token is not None)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context: the begin token, else the end token."""
        begin = self._tokenizer.bos_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens of a text, with the begin token (once) where the model expects it."""
        return self._tokenizer.encode(string, special=True, add_bos=False if add_special_tokens is False else None)

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's caches of requests."""
        return self._tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the template that lm-eval asks for by name; True: the usual one; False: None."""
        if chat_template is False or chat_template is None:
            return None
        named = chat_template if isinstance(chat_template, str) else self._named_template
        return self._find_template(named).source

    def _find_template(self, named: str | None) -> ChatTemplate:
        self._template = load_chat_template(self._tokenizer, named)
        return self._template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; without `add_generation_prompt` it ends inside of its last message."""
        template = self._template or self._find_template(self._named_template)
        text = template.render(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    # -- log-probabilities --------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation in nats, and whether greedy decoding would write it."""
        found = self._score([request[1:] for request in requests])
        for (name, *_tokens), answer in zip(requests, found, strict=True):
            if name is not None:
                self.cache_hook.add_partial("loglikelihood", name, answer)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts: windows of `max_length` tokens, each token scored once."""
        texts = [request.args[0] for request in requests]
        windows: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for number, text in enumerate(texts):
            mine = utils.get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            windows += [utils.make_disjoint_window(window) for window in mine]
            owners += [number] * (len(windows) - len(owners))
        sums = np.zeros(len(texts))
        np.add.at(sums, owners, [score for score, _ in self._score(windows)])
        for text, total in zip(texts, sums.tolist(), strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return sums.tolist()

    def _score(self, pairs: Sequence[Sequence[list[int]]]) -> list[tuple[float, bool]]:
        if not pairs:
            return []
        rows = Continuations(pairs, self.max_length)
        filled = FilledRows(rows, self.batch_size, data_ranks(self._model.mesh))
        found = outputs_of(self._scores, filled, filled.size, self._model.plan.batch_sharding, whole=False)
        place = np.arange(len(pairs))
        place = place // self.batch_size * filled.size + place % self.batch_size
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        for number, logps, greedy in zip(rows.order, found["logps"][place], found["greedy"][place], strict=True):
            answers[number] = (float(logps), bool(greedy))
        return answers

    # -- generation ---------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes behind each context, up to a stop string."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(number)
        texts = [""] * len(requests)
        for numbers in groups.values():
            options = self._options(requests[numbers[0]].args[1])
            room = self.max_length - options["max_new_tokens"]
            if room < 1:
                raise ConfigError(
                    f"a task generates {options['max_new_tokens']} tokens, and the model takes {self.max_length}",
                    "lower max_gen_toks in the task's generation_kwargs",
                )
            prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
            prompts = [ids or [self.prefix_token_id] for ids in prompts]
            rows = generate_sorted(self._generate, prompts, self.batch_size, **options)
            for number, row in zip(numbers, rows, strict=True):
                texts[number] = self._text(row.ids, options["stop"])
                self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
        return texts

    def _text(self, ids: list[int], stop: Sequence[str]) -> str:
        """Of the new tokens alone, as lm-eval decodes them: some tokenizers write no space before a first word."""
        return postprocess_generated_text(self._tokenizer.decode(ids), list(stop), None)

    def _generate(self, prompts: list[list[int]], **options: Any) -> Any:
        return generate(self._model, prompts, **options)

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        """lm-eval's generation_kwargs as options of `generate`."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(given, MAX_NEW_TOKENS))
        until = kwargs.pop("until", None) or []
        options: dict[str, Any] = {
            "stop": [text for text in ([until] if isinstance(until, str) else until) if text],
            "max_new_tokens": kwargs.pop("max_gen_toks"),
            "temperature": kwargs.pop("temperature", 0.0),
        }
        for name, value in kwargs.items():
            if name in _IDLE or (name in _OF_SAMPLING and not options["temperature"]):
                continue
            if name not in (*_OF_SAMPLING, "repetition_penalty"):
                raise ConfigError(f"a task's generation_kwargs ask for {name}: {value!r}", "leave it out of the task")
            options[name] = value
        return options


class Continuations:
    """Pairs of tokens (context, continuation) as rows, from the longest to the shortest.

    Args:
      pairs: a context that is too long loses its beginning.
      max_length: tokens that the model reads of a pair: all but the last one.

    Attributes:
      order: the pair of each row.
    """

    def __init__(self, pairs: Sequence[Sequence[list[int]]], max_length: int):
        self.order = sorted(range(len(pairs)), key=lambda number: -sum(map(len, pairs[number])))
        self._ids = [[*pairs[number][0], *pairs[number][1]][-(max_length + 1) :] for number in self.order]
        self._scored = [len(pairs[number][1]) for number in self.order]
        self._longest = rounded_length(max(map(len, self._ids)) - 1)

    def __len__(self) -> int:
        return len(self._ids)

    def batch_length(self, indices: np.ndarray) -> int:
        """Tokens that a batch of these rows is padded to."""
        return rounded_length(max((len(self._ids[n]) - 1 for n in indices if n < len(self)), default=1))

    def rows(self, indices: np.ndarray) -> Batch:
        """input_ids, targets, segment_ids and position_ids, int32 [n, L]; rows past the end hold nothing."""
        shape = (len(indices), self._longest)
        batch = {name: np.zeros(shape, np.int32) for name in ("input_ids", "segment_ids", "position_ids")}
        batch["targets"] = np.full(shape, IGNORE, np.int32)
        for row, number in enumerate(indices):
            if number < len(self):
                ids, scored = self._ids[number], self._scored[number]
                length = len(ids) - 1
                batch["input_ids"][row, :length] = ids[:-1]
                batch["segment_ids"][row, :length] = 1
                batch["position_ids"][row, :length] = np.arange(length)
                batch["targets"][row, length - scored : length] = ids[-scored:]
        return batch


def continuation_scores(model: nnx.Module, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Of each row [b]: `logps`, the sum of its targets' log-probabilities; `greedy`, whether each is the likeliest."""
    hidden = model.hidden(  # type: ignore[attr-defined]
        batch["input_ids"], position_ids=batch["position_ids"], segment_ids=batch["segment_ids"]
    )
    targets = batch["targets"]
    scores = token_scores(hidden, model.head(), targets, softcap=logit_cap(model))  # type: ignore[attr-defined]
    return {"logps": scores.logps.sum(1), "greedy": jnp.where(targets == IGNORE, 1.0, scores.correct).min(1) > 0}
