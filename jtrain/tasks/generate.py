"""Text from a model: `jtrain.generate`, and the samples that a trainer prints.

Prompts of any lengths go through one compiled program (`jtrain.models.decoding`). Its shapes are rounded up, so that
few programs are compiled; they are kept as long as the model.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jtrain import progress
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import ConfigError
from jtrain.models.config import DecoderConfig
from jtrain.models.decoding import Request, State
from jtrain.models.decoding import generate as decode
from jtrain.models.decoding import resume as decode_on
from jtrain.parallel.sharding import Rules
from jtrain.parallel.xla import compiler_options
from jtrain.tasks.decoder import check_language_model
from jtrain.tasks.generation_request import (
    GenerateOptions,
    as_prompts,
    check_images,
    check_prompts,
    read_prompt,
    rounded_length,
)
from jtrain.tasks.generation_text import RowText
from jtrain.tasks.layer_views import layer_views
from jtrain.tasks.loaded import LoadedModel
from jtrain.train.state import SAMPLE_STREAM, stream_key
from jtrain.train.step import make_forward

Stream = Callable[[int, str], None]
"""`stream(row, text)`: called with every new piece of a row's text; the pieces of a row make its text."""

_STREAMED, _SEARCHED = 4, 16  # tokens between two looks from the host


@dataclasses.dataclass(frozen=True)
class Generation:
    """What followed a prompt.

    Attributes:
      text: without the stop string or token that ended it; empty where the model has no tokenizer.
      ids: the tokens as they were drawn, with the one that ended the row.
      logprobs: their log-probabilities in nats under the model itself, before penalty, temperature and cut-offs.
      finish_reason: `stop` (a stop token or string) or `length` (max_new_tokens).
      prompt_ids: the prompt.
    """

    text: str
    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    prompt_ids: list[int]


def generate(
    model: LoadedModel,
    prompts: Any,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] | None = None,
    seed: int = 0,
    batch_size: int = 0,
    stream: Stream | None = None,
) -> list[Generation]:
    """Continues prompts.

    Args:
      model: from `load_model`.
      prompts: a text, token ids or a conversation (a list of messages with role and content, which goes through the
        model's chat template); or a list of them. Messages for a model that sees may hold images, as the records of SFT
        do: parts {"type": "image", "path": ...}.
      max_new_tokens: of each row.
      temperature: what scores are divided by before a token is drawn; 0 takes the likeliest token.
      top_k: only the k likeliest tokens are drawn; 0: all.
      top_p: only the likeliest tokens that have this probability together; 1: all.
      min_p: only tokens that have this share of the likeliest one's probability; 0: all.
      repetition_penalty: what scores above 0 of tokens that stand in the row already are divided by (and those below
        multiplied); 1: none. Order and definitions of all of these are Hugging Face's.
      stop: strings that end a row, wherever tokens begin and end.
      stop_token_ids: tokens that end a row; None: those of the tokenizer and generation_config.json.
      seed: of the draws. That of a token depends on (seed, number of its prompt, its position), not on the batch or
        mesh.
      batch_size: prompts that are computed together; 0: all.
      stream: called with each row's text as it grows.

    Returns:
      One `Generation` a prompt, in order; a list for a single prompt as well.

    Raises:
      ConfigError: an option out of its range, a prompt that is too long for the model, text and no tokenizer.
      DataError: a prompt of no known form, a token that the model has not, messages and no chat template.
    """
    options = GenerateOptions(
        max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop, stop_token_ids, seed
    )
    if batch_size < 0:
        raise ConfigError(f"generate: batch_size={batch_size}", "write a positive number, or 0 for all prompts at once")
    read = [read_prompt(model.tokenizer, prompt) for prompt in as_prompts(prompts)]
    ids, images = [one[0] for one in read], [one[1] for one in read]
    generator = _generators.get(model)
    if generator is None:
        _generators[model] = generator = Generator.of(model)
    return generator(model.params, model.variables, ids, options, images=images, batch_size=batch_size, stream=stream)


class _Shape(NamedTuple):
    """What a program is compiled for, beside the options that are in use."""

    prompt: int
    new: int


class Generator:
    """The compiled programs of one model.

    Args:
      decoder: its shape.
      tokenizer: None: rows have no text.
      mesh: the devices.
      rules: logical axis -> mesh axes.
      forward: `forward(function, name)` jits `function(module, *arguments)`; see `make_forward`.
      options: compiler options; None: `forward` brings its own.
      views: parameters of every layer by themselves; see `layer_views`.

    Raises:
      ConfigError: a model that gives no distributions of tokens.
    """

    def __init__(
        self,
        decoder: DecoderConfig,
        tokenizer: Tokenizer | None,
        mesh: Mesh,
        rules: Rules,
        forward: Callable[[Callable[..., Any], str], Callable[..., Any]],
        *,
        options: dict[str, Any] | None = None,
        views: Any = None,
    ):
        check_language_model(decoder, "MODEL")
        self._decoder, self._tokenizer, self._views = decoder, tokenizer, views
        self._ranks = int(np.prod([mesh.shape[axis] for axis in rules["batch"]]))
        self._forward, self._options = forward, options
        self._programs: dict[tuple[str, _Shape], Callable[..., Any]] = {}

    @staticmethod
    def of(model: LoadedModel) -> Generator:
        """That of a loaded model."""

        split, plan = model.model, model.plan  # not the model itself, which may go while this lives

        def forward(function: Callable[..., Any], name: str) -> Callable[..., Any]:
            return make_forward(split, plan, function, name=name)

        options = compiler_options(model.mesh.devices.flat[0].platform)
        return Generator(
            model.decoder, model.tokenizer, model.mesh, model.rules, forward, options=options, views=layer_views(model)
        )

    def __call__(
        self,
        params: Any,
        variables: Any,
        prompts: Sequence[Sequence[int]],
        options: GenerateOptions,
        *,
        images: Sequence[Sequence[np.ndarray]] | None = None,
        batch_size: int = 0,
        stream: Stream | None = None,
    ) -> list[Generation]:
        """Continues prompts of tokens; see `generate`. `images`: of every prompt, in the order of their tokens."""
        images = [()] * len(prompts) if images is None else images
        check_prompts(prompts, options.max_new_tokens, self._decoder)
        check_images(prompts, images, self._decoder)
        if options.stop and self._tokenizer is None:
            raise ConfigError("generate: stop strings, and the model has no tokenizer", "write stop_token_ids")
        size = batch_size or max(len(prompts), 1)
        found: list[Generation] = []
        for first in range(0, len(prompts), size):
            rows, seen = prompts[first : first + size], images[first : first + size]
            found += self._batch(params, variables, rows, seen, first, options, stream)
        return found

    def _batch(
        self,
        params: Any,
        variables: Any,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Sequence[np.ndarray]],
        first: int,
        options: GenerateOptions,
        stream: Stream | None,
    ) -> list[Generation]:
        limit, longest = options.max_new_tokens, max(map(len, prompts))
        shape = _Shape(rounded_length(longest), rounded_length(limit))
        rows = -(-len(prompts) // self._ranks) * self._ranks
        if self._views is not None:
            # XLA's CPU backend writes loops of its own for a product with one row: slower than its library with two,
            # and each of them is compiled by itself.
            rows = max(rows, 2)
        ids = np.zeros((rows, shape.prompt), np.int32)
        start = np.full(rows, shape.prompt - 1, np.int32)  # rows that only fill the mesh hold one token
        for row, prompt in enumerate(prompts):
            start[row] = shape.prompt - len(prompt)
            ids[row, start[row] :] = prompt
        pixels = self._pixels(images, rows)
        stop = options.stop_token_ids
        if stop is None:
            stop = () if self._tokenizer is None else self._tokenizer.stop_ids
        request = Request(
            start=start,
            row=np.arange(first, first + rows, dtype=np.int32),
            key=stream_key(options.seed, SAMPLE_STREAM),
            how=options.sampling(),
            stop=np.asarray([*stop] or [-1], np.int32),
            limit=np.int32(limit),
            length=shape.prompt - start + np.int32(limit),
        )
        request, top_k = request._replace(how=request.how._replace(top_k=None)), request.how.top_k
        texts = [RowText(self._tokenizer, prompt, options.stop) for prompt in prompts]
        ended = np.arange(rows) >= len(prompts)
        chunk = _STREAMED if stream is not None else _SEARCHED if options.stop else limit
        upto = 1 if stream is not None else min(chunk, limit)
        state = self._start(shape, top_k)(
            params, variables, ids, ended, request._replace(limit=np.int32(upto)), self._views, pixels
        )
        counted, lengths = 0, np.zeros(len(prompts), int)
        while True:
            new, ended = _on_host(state.ids), np.array(_on_host(state.ended))
            progress.report()
            for row, text in enumerate(texts):
                live = new[row, counted:upto]
                for token in live[live >= 0]:
                    if text.stopped:
                        break
                    lengths[row] += 1
                    if token not in stop:
                        text.push(int(token))
                if ended[row] or text.stopped or upto == limit:
                    text.finish()
                ended[row] |= text.stopped
                if stream is not None and (piece := text.take()):
                    stream(first + row, piece)
            if upto == limit or ended.all():
                break
            counted, upto = upto, min(upto + chunk, limit)
            state = self._resume(shape, top_k)(
                params, variables, state._replace(ended=ended), request._replace(limit=np.int32(upto)), self._views
            )
        logprobs = _on_host(state.logprobs)
        return [
            Generation(
                text.text,
                new[row, :length].tolist(),
                logprobs[row, :length].tolist(),
                "stop" if ended[row] else "length",
                [*map(int, prompts[row])],
            )
            for row, (text, length) in enumerate(zip(texts, lengths, strict=True))
        ]

    def _pixels(self, images: Sequence[Sequence[np.ndarray]], rows: int) -> np.ndarray | None:
        """The images of some prompts [rows, I, height, width, channels]; None: there are none."""
        most = max(map(len, images), default=0)
        if self._decoder.images is None or not most:
            return None
        pixels = np.zeros((rows, 1 << (most - 1).bit_length(), *self._decoder.images.shape()), np.float32)
        for row, mine in enumerate(images):
            for slot, image in enumerate(mine):
                pixels[row, slot] = image
        return pixels

    def _start(self, shape: _Shape, top_k: int | None) -> Callable[..., State]:
        def run(module: Any, ids: jax.Array, ended: jax.Array, request: Request, views: Any, pixels: Any) -> State:
            request = request._replace(how=request.how._replace(top_k=top_k))
            return decode(module, ids, ended, request, new_tokens=shape.new, views=views, pixels=pixels)

        return self._jitted("generate", shape, top_k, run)

    def _resume(self, shape: _Shape, top_k: int | None) -> Callable[..., State]:
        def run(module: Any, state: State, request: Request, views: Any) -> State:
            request = request._replace(how=request.how._replace(top_k=top_k))
            return decode_on(module, state, request, prompt=shape.prompt, views=views)

        return self._jitted("resume", shape, top_k, run)

    def _jitted(self, name: str, shape: _Shape, top_k: int | None, run: Callable[..., Any]) -> Callable[..., Any]:
        key = f"{name}:{top_k}", shape
        if key not in self._programs:
            program = self._forward(run, name)
            if self._options is not None:
                donated = (2,) if name == "resume" else ()
                program = jax.jit(program, donate_argnums=donated, compiler_options=self._options or None)
            self._programs[key] = program
        return self._programs[key]


def _on_host(array: jax.Array) -> np.ndarray:
    """The whole of an array, in every process."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


_generators: weakref.WeakKeyDictionary[LoadedModel, Generator] = weakref.WeakKeyDictionary()


__all__ = ["GenerateOptions", "Generation", "Generator", "generate"]
