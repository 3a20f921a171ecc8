"""Tokenising in processes of their own: `python -m jtrain.data.worker`, spoken to in lines of JSON over its pipes.

A process of our own rather than `multiprocessing`: it never runs the user's script again (a script without a main
guard would start itself), imports no jax, and ends by itself when its parent is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jtrain.errors
from jtrain.data.sources import Chunk
from jtrain.data.tokenise import AnyRecipe, ChunkResult, recipe_of, tokenise_chunk
from jtrain.data.tokenizers import load_tokenizer
from jtrain.errors import DataError, JtrainError


class Worker:
    """The parent's end of one worker process."""

    def __init__(self, tokenizer: str, recipe: AnyRecipe):
        package = str(Path(jtrain.errors.__file__).parents[1])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jtrain.data.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
        )
        self._say({"tokenizer": tokenizer, "recipe": asdict(recipe)})

    def run(self, chunk: Chunk, out: str) -> ChunkResult:
        """Tokenises a chunk there; raises what it raised."""
        try:
            self._say({"chunk": asdict(chunk), "out": out})
            answer = self._process.stdout.readline() if self._process.stdout else b""
        except OSError:
            answer = b""
        if not answer:
            raise DataError(
                f"{chunk.path}: the process that tokenised it ended with {self._process.wait()}",
                "It may have run out of memory: set data.num_workers lower.",
            )
        found = json.loads(answer)
        if "error" in found:
            kind = getattr(jtrain.errors, found["error"], RuntimeError)
            raise kind(*found["arguments"])
        return ChunkResult(**found)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):  # of what a dead worker never read
                    pipe.close()

    def _say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()


def tokenise_parallel(
    jobs: Sequence[tuple[Chunk, str]], recipe: AnyRecipe, tokenizer: str, workers: int
) -> Iterator[ChunkResult]:
    """Results of the jobs in order, made by several processes at once."""
    started: list[Worker] = []
    pool = ThreadPoolExecutor(workers, thread_name_prefix="jtrain-tokenise")
    try:
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for _ in range(workers):
            started.append(Worker(tokenizer, recipe))
            idle.put(started[-1])

        def run(job: tuple[Chunk, str]) -> ChunkResult:
            worker = idle.get()
            try:
                return worker.run(*job)
            finally:
                idle.put(worker)

        yield from pool.map(run, jobs)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in started:
            worker.close()
        pool.shutdown(wait=True)


def main() -> int:
    """The worker's end: first line the tokenizer and the recipe, then one job a line until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the parent, which ends this process
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints stays out of the protocol
    setup = json.loads(sys.stdin.readline())
    recipe = recipe_of(setup["recipe"])
    tokenizer = load_tokenizer(setup["tokenizer"])
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = asdict(tokenise_chunk(Chunk(**job["chunk"]), recipe, tokenizer, job["out"]))
        except JtrainError as error:
            answer = {"error": type(error).__name__, "arguments": [error.message, error.remedy]}
        except Exception as error:
            answer = {"error": "", "arguments": [f"{type(error).__name__}: {error}"]}
        try:
            print(json.dumps(answer), file=answers, flush=True)
        except BrokenPipeError:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
