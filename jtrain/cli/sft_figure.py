"""The figure `sft` of `jtrain bench`: tokens a second of SFT, beside TRL's SFTTrainer in one run."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.config.paths import recipe_folder
from jtrain.errors import ConfigError
from jtrain.tasks.sft import SFTTrainer

PEER = "JTRAIN_BENCH_PEER"
"""Variable that names a Python interpreter with trl and torch."""
_TURNS, _STEPS = 5, 4
_LENGTH, _ROWS = 256, 8


def sft(model: str | None = None, peer: str | None = None) -> dict[str, dict[str, Any]]:
    """Updates of SFT in float32 on the bundled conversations: 8 rows, padded, up to 256 tokens, every token learned.

    Loader, loss, gradients and AdamW are in it, on both sides; what compiles is left out. Both take turns, so that
    another load on the machine hits both; the ratio is the median of the turns' ratios. Tokens are without padding.

    Args:
      model: a folder with a model, a tokenizer and a chat template; by default the bundled tiny one.
      peer: an interpreter with trl; by default JTRAIN_BENCH_PEER.

    Raises:
      ConfigError: `peer` names no interpreter that answers.
    """
    assets = recipe_folder() / "assets"
    folder = str(Path(model).expanduser()) if model else str(assets / "tinykjv-1m")
    with gzip.open(assets / "sft-jargon.jsonl.gz", "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file][:400]
    python = peer or os.environ.get(PEER)
    mine, theirs = [], []
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="jtrain-bench-"))
        other = None if python is None else stack.enter_context(_peer(python, folder, records, scratch))
        turn = stack.enter_context(_ours(folder, records, scratch))
        for _ in range(_TURNS):
            mine.append(turn())
            if other is not None:
                theirs.append(other.turn())
    rate = statistics.median(mine)
    against, ratio = f"TRL: not measured, set {PEER}", None
    if other is not None:
        ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        against = f"TRL {other.version}: {statistics.median(theirs):,.0f} tokens/s"
    found = {"value": rate, "unit": "tokens/s, float32", "against": against, "ratio": ratio}
    return {"sft_tokens_per_second": found}


@contextlib.contextmanager
def _ours(folder: str, records: list[dict[str, Any]], scratch: str) -> Iterator[Any]:
    """`turn() -> tokens a second` of some updates."""
    config = {
        "run_dir": f"{scratch}/run",
        "max_steps": 10_000,
        "max_length": _LENGTH,
        "per_device_batch_size": _ROWS,
        "precision": "32-true",
        "devices": 1,
        "model": {"remat": "none"},
        "logging": {"trackers": []},
    }
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = SFTTrainer(config, model=folder, train_dataset=records)
    step = 0
    with trainer.train_loader() as loader:

        def updates() -> int:
            nonlocal step
            tokens = 0
            for _ in range(_STEPS):
                trainer.state, metrics = trainer.train_step(trainer.state, loader[step])
                step += 1
                tokens += int(metrics["tokens"])
            jax.block_until_ready(trainer.state)
            return tokens

        def turn() -> float:
            started = time.perf_counter()
            tokens = updates()
            return tokens / (time.perf_counter() - started)

        _compile_all(trainer)
        updates()
        yield turn


def _compile_all(trainer: SFTTrainer) -> None:
    """Every length that a batch may have."""
    rows, sharding = trainer.train_rows, trainer.program.batch_sharding
    assert rows is not None
    whole = rows.rows(np.arange(_ROWS)) | {"row": np.arange(_ROWS, dtype=np.int32)}

    def batch(length: int) -> dict[str, jax.Array]:
        arrays = {name: (values[:, :length] if values.ndim == 2 else values)[None] for name, values in whole.items()}
        return {name: jax.device_put(values, _place(sharding, values.ndim)) for name, values in arrays.items()}

    for length in rows.buckets:
        trainer.train_step.compile(trainer.state, batch(length))


def _place(sharding: NamedSharding, rank: int) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*tuple(sharding.spec)[:rank]))


class _Peer:
    """A running `sft_peer`."""

    def __init__(self, process: subprocess.Popen[str], log: Path):
        self._process, self._log = process, log
        self.version = self._answer()["version"]
        self._answer()  # the first updates, which warm up

    def turn(self) -> float:
        """Tokens a second of some updates."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = self._answer()
        return found["tokens"] / found["seconds"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text().strip().splitlines() or ["it says nothing"]
            raise ConfigError(
                f"bench sft: TRL does not run: {said[-1]}",
                f"name an interpreter with trl and torch (--peer or {PEER}), or leave it out",
            )
        return json.loads(line)


@contextlib.contextmanager
def _peer(python: str, folder: str, records: list[dict[str, Any]], scratch: str) -> Iterator[_Peer]:
    """Starts the other side."""
    request = Path(scratch) / "request.json"
    shape = {"steps": _STEPS, "rows": _ROWS, "length": _LENGTH, "out": f"{scratch}/trl"}
    request.write_text(json.dumps({"folder": folder, "records": records, **shape}))
    log = Path(scratch) / "peer.log"
    pipe = subprocess.PIPE
    with open(log, "w") as errors:
        try:
            script = str(Path(__file__).with_name("sft_peer.py"))
            command = [python, script, str(request)]
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True)
        except OSError as error:
            raise ConfigError(
                f"bench sft: {python!r} does not run: {error.strerror}",
                f"name an interpreter with trl and torch (--peer or {PEER}), or leave it out",
            ) from error
        try:
            yield _Peer(process, log)
        finally:
            process.kill()
            process.communicate()
