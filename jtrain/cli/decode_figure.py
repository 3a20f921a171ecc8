"""The figure `decode` of `jtrain bench`: tokens a second of `jtrain.generate`, beside transformers' in one run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.errors import ConfigError
from jtrain.models.config import DecoderConfig
from jtrain.tasks.generate import Generation, generate
from jtrain.tasks.loaded import LoadedModel
from jtrain.tasks.loading import load_model

PEER = "JTRAIN_BENCH_PEER"
"""Variable that names a Python interpreter with transformers and torch."""
_ROWS, _PROMPT, _NEW, _TURNS = (1, 8), 32, 64, 5


def decode(model: str, peer: str | None = None) -> dict[str, dict[str, Any]]:
    """Greedy continuations of 32 random tokens by 64, in float32, of 1 row and of 8.

    Both sides take turns, so that another load on the machine hits both; the ratio is the median of the turns' ratios.
    Times are of whole calls, the reading of the prompt included; the first call of a shape, which compiles, is left
    out.

    Args:
      model: what `load_model` takes. Of a preset both sides draw their own weights.
      peer: an interpreter with transformers and torch; by default JTRAIN_BENCH_PEER, else this one if it has them.

    Raises:
      ConfigError: `peer` names no interpreter that answers.
    """
    loaded = load_model(model)
    python = peer or os.environ.get(PEER) or (sys.executable if _has_transformers() else None)
    found: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        other = None if python is None else stack.enter_context(_peer(python, model, loaded.decoder))
        for rows in _ROWS:
            found |= _of_rows(loaded, rows, other)
    return found


def _of_rows(loaded: LoadedModel, rows: int, other: _Peer | None) -> dict[str, dict[str, Any]]:
    prompts = np.random.default_rng(0).integers(0, loaded.decoder.vocab_size, (rows, _PROMPT)).tolist()
    mine, theirs = [], []
    same = True
    for turn in range(_TURNS + 1):
        started = time.perf_counter()
        ours = _ours(loaded, prompts)
        seconds = time.perf_counter() - started
        answer = other.generate(prompts) if other else None
        if turn:  # the first compiles
            mine.append(rows * _NEW / seconds)
            if answer:
                theirs.append(rows * _NEW / answer["seconds"])
                same &= [row.ids for row in ours] == answer["ids"]
    name = f"decode_tokens_per_second_{rows}"
    rate = statistics.median(mine)
    if other is None:
        return {name: _figure(rate, f"transformers: not measured, set {PEER}", None)}
    ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
    against = f"transformers {other.version}: {statistics.median(theirs):.1f} tokens/s"
    if other.weights:
        against += f", {'the same' if same else 'other'} tokens"
    return {name: _figure(rate, against, ratio)}


def _ours(loaded: LoadedModel, prompts: list[list[int]]) -> list[Generation]:
    return generate(loaded, prompts, max_new_tokens=_NEW, stop_token_ids=[])


def _figure(value: float, against: str, ratio: float | None) -> dict[str, Any]:
    return {"value": value, "unit": "tokens/s, float32", "against": against, "ratio": ratio}


def _has_transformers() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


class _Peer:
    """A running `decode_peer`."""

    def __init__(self, process: subprocess.Popen[str], weights: bool):
        self._process = process
        self.weights = weights
        self.version = self._answer()["version"]

    def generate(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Seconds and new ids of every row."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": _NEW}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            said = self._process.stderr.read().strip().splitlines() or ["it says nothing"]
            raise ConfigError(
                f"bench decode: transformers does not run: {said[-1]}",
                f"name an interpreter with transformers and torch (--peer or {PEER}), or leave it out",
            )
        return json.loads(line)


@contextlib.contextmanager
def _peer(python: str, model: str, decoder: DecoderConfig) -> Iterator[_Peer]:
    """Starts the other side on the same folder, or for a preset on one with its config alone."""
    with tempfile.TemporaryDirectory(prefix="jtrain-bench-") as empty:
        folder = Path(model).expanduser()
        weights = folder.is_dir()
        if not weights:
            from jtrain.models.families import family_of

            folder = Path(empty)
            (folder / "config.json").write_text(json.dumps(family_of(decoder).hf_config(decoder)))
        script = str(Path(__file__).with_name("decode_peer.py"))
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen([python, script, str(folder)], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        except OSError as error:
            raise ConfigError(
                f"bench decode: {python!r} does not run: {error.strerror}",
                f"name an interpreter with transformers and torch (--peer or {PEER}), or leave it out",
            ) from error
        try:
            yield _Peer(process, weights)
        finally:
            process.kill()
            process.communicate()
