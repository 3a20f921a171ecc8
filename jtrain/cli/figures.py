"""The measurements of `jtrain bench`. Each gives name -> {value, unit, against, ratio}.

What is compared is measured in turns in one process, so that another load on the machine hits both sides; medians are
quoted. Times are wall time unless the unit says CPU.
"""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jtrain import Callback, Checkpoints, DataLoader, PretrainTrainer, Trainer, load_config, make_mesh
from jtrain.cli.decode_figure import decode
from jtrain.cli.sft_figure import sft
from jtrain.data.packing import plan_rows
from jtrain.data.rows import PackedRows, TrainRows
from jtrain.data.store import TokenStore
from jtrain.models.decoder import Decoder
from jtrain.models.presets import preset as shape_of
from jtrain.tasks.pretrain import pretrain_loss
from jtrain.train.program import build_program, mesh_and_batch

__all__ = ["decode", "help", "hlo", "loader", "mfu", "save", "sft", "startup", "trainer"]
Figures = dict[str, dict[str, Any]]
_TURNS, _STEPS = 12, 5
_SAVE_BYTES = 512 * 2**20


def figure(value: float | None, unit: str, *, against: str = "", ratio: float | None = None) -> dict[str, Any]:
    """One figure in the form that programs read."""
    return {"value": value, "unit": unit, "against": against, "ratio": ratio}


def trainer() -> Figures:
    """A Trainer's step (loader, figures, callbacks and all) against a jitted loop of the same model and optimizer."""
    with _folder() as folder:
        turns = _Turns()
        subject = PretrainTrainer(
            _small(folder, max_steps=_TURNS * _STEPS + 2), callbacks=[turns], train_dataset=_rows(128, 1024, 100_000)
        )
        turns.other = _hand_written(subject)
        with contextlib.redirect_stdout(io.StringIO()):
            subject.fit()
    mine, other = statistics.median(turns.mine), statistics.median(turns.others)
    # The median of the turns' differences: a turn whose neighbour was slowed by something else is an outlier.
    overhead = statistics.median(a - b for a, b in zip(turns.mine, turns.others, strict=True))
    return {
        "trainer_step_ms": figure(1e3 * mine, "ms", against="hand-written loop", ratio=mine / other),
        "trainer_overhead_ms": figure(
            1e3 * overhead, "ms a step", against=f"{1e3 * other:.2f} ms", ratio=overhead / other
        ),
    }


class _Turns(Callback):
    """Every `_STEPS` steps lets the other loop take as many, and times both."""

    def __init__(self) -> None:
        self.mine: list[float] = []
        self.others: list[float] = []
        self.other: Any = None
        self._started: float | None = None

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        if step < 2 or (step - 2) % _STEPS:
            return
        jax.block_until_ready(trainer.state)  # the step in flight is this turn's
        now = time.perf_counter()
        if self._started is not None:
            self.mine.append((now - self._started) / _STEPS)
            self.other(_STEPS)
            self.others.append((time.perf_counter() - now) / _STEPS)
        else:
            self.other(2)
        self._started = time.perf_counter()


def _hand_written(subject: PretrainTrainer) -> Any:
    """`loop(n)`: n steps as one would write them without a trainer, on the same mesh, model, data and optimizer."""
    program = subject.program
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, b2=0.95, weight_decay=0.1))
    weights, _ = program.model.init(jax.random.key(0))
    place = NamedSharding(program.mesh, PartitionSpec())
    weights = jax.device_put(weights, place)
    memory = jax.device_put(tx.init(weights), place)
    with subject.train_loader() as batches:
        host = jax.device_get([batches[step] for step in range(_STEPS)])
    loss_of = pretrain_loss()

    def objective(weights: Any, micro: Any) -> jax.Array:
        loss = loss_of(program.model.merge(weights, {}), micro, None)
        return loss.sum / loss.count

    def step(weights: Any, memory: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        with jax.default_matmul_precision("highest"):
            loss, gradients = jax.value_and_grad(objective)(weights, jax.tree.map(lambda x: x[0], batch))
        updates, memory = tx.update(gradients, memory, weights)
        return optax.apply_updates(weights, updates), memory, loss

    jitted = jax.jit(step, donate_argnums=(0, 1))

    def loop(steps: int) -> None:
        nonlocal weights, memory
        for number in range(steps):
            batch = jax.device_put(host[number % len(host)], program.batch_sharding)
            weights, memory, loss = jitted(weights, memory, batch)
        jax.block_until_ready(loss)

    return loop


def loader() -> Figures:
    """Batches of 64 x 2048 tokens from a memory-mapped store, placed on one device."""
    rows = _rows(2048, 20_000, 20_000_000)
    mesh = make_mesh("data=1", devices=jax.devices()[:1])
    sharding = NamedSharding(mesh, PartitionSpec(None, "data"))
    with DataLoader(rows, global_batch_size=64, sharding=sharding, prefetch=2) as batches:
        batches[0]
        wall, cpu = time.perf_counter(), time.process_time()
        for step in range(1, 101):
            jax.block_until_ready(batches[step])
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokens = 100 * 64 * 2048
    return {
        "loader_tokens_per_core": figure(
            tokens / cpu, "tokens/CPU-s", against="20M tokens/CPU-s", ratio=tokens / cpu / 20e6
        ),
        "loader_tokens_per_second": figure(tokens / wall, "tokens/s"),
    }


def save() -> Figures:
    """Eight asynchronous saves of 512 MiB while nothing else runs; medians after the first."""
    blocking, whole = [], []
    mesh = make_mesh("fsdp=-1,data=1")
    place = NamedSharding(mesh, PartitionSpec("fsdp"))
    columns = 2**16
    state = {
        "x": jax.device_put(np.random.default_rng(0).random((_SAVE_BYTES // 4 // columns, columns), np.float32), place)
    }
    with _folder() as folder, Checkpoints(folder, save_total_limit=1) as checkpoints:
        for step in range(1, 9):
            started = time.perf_counter()
            checkpoints.save(step, state, {})
            blocking.append(time.perf_counter() - started)
            checkpoints.wait()
            whole.append(time.perf_counter() - started)
    ratio = statistics.median(a / b for a, b in zip(blocking[1:], whole[1:], strict=True))
    return {
        "save_stall_ms": figure(1e3 * statistics.median(blocking[1:]), "ms", against="the save", ratio=ratio),
        "save_seconds": figure(statistics.median(whole[1:]), "s for 512 MiB, durable"),
    }


def help() -> Figures:
    """Wall time of `jtrain --help` in a process of its own, median of five."""
    times = [_timed([sys.executable, "-m", "jtrain", "--help"]) for _ in range(5)]
    value = statistics.median(times)
    return {"help_seconds": figure(value, "s", against="1 s", ratio=value)}


def startup() -> Figures:
    """`jtrain train cpu-tiny` for one step, no checkpoint: with an empty compile cache, then with a full one."""
    with _folder() as folder:
        # cpu-tiny evaluates and samples nothing: what is left is import, tokenising, compiling, one step
        command = [sys.executable, "-m", "jtrain", "train", "cpu-tiny", "--fast_dev_run", "1", "--data.eval", "0"]
        command += ["--compile_cache", str(folder / "xla"), "--data.cache_dir", str(folder / "data")]
        cold, warm = _timed(command), _timed(command)
    return {
        "startup_cold_seconds": figure(cold, "s"),
        "startup_cached_seconds": figure(warm, "s", against="cold", ratio=warm / cold),
    }


def hlo() -> Figures:
    """Lines of the optimised program of a small decoder's training step."""
    sizes = {layers: _hlo_lines(layers) for layers in (4, 32)}
    return {
        "hlo_lines_32_layers": figure(sizes[32], "lines", against=f"{sizes[4]} at 4 layers", ratio=sizes[32] / sizes[4])
    }


def _hlo_lines(layers: int) -> int:
    config, mesh, batch = mesh_and_batch(
        load_config(
            {"max_steps": 1, "max_length": 64, "global_batch_size": len(jax.devices()), "precision": "32-true"}
        ),
        jax.devices(),
    )
    shape = shape_of(
        "llama-tiny", num_hidden_layers=layers, hidden_size=64, intermediate_size=128, num_attention_heads=2
    )
    program = build_program(
        config, lambda rngs: Decoder(shape, rngs), pretrain_loss(), mesh=mesh, batch=batch, max_steps=1
    )
    rows = jax.ShapeDtypeStruct((1, batch.total, 64), jnp.int32, sharding=program.batch_sharding)
    counts = jax.ShapeDtypeStruct((1, batch.total), jnp.int32, sharding=program.batch_sharding)
    arrays = dict.fromkeys(("input_ids", "labels", "segment_ids", "position_ids"), rows) | {"row": counts}
    compiled = program.train_step.lower(program.plan.abstract, arrays).compile()
    return len(compiled.as_text().splitlines())


def mfu(preset: str) -> Figures:
    """Twelve steps of a preset in bf16-mixed over all devices (fsdp), random tokens; the second half is measured."""
    length = min(2048, shape_of(preset).max_position_embeddings) if jax.devices()[0].platform != "cpu" else 256
    with _folder() as folder:
        subject = PretrainTrainer(
            {
                "run_dir": str(folder / "run"),
                "max_steps": 12,
                "max_length": length,
                "global_batch_size": 8 * len(jax.devices()),
                "strategy": "zero3",
                "precision": "auto",
                "model": {"preset": preset, "vocab_size": shape_of(preset).vocab_size},
                "logging": {"log_every_n_steps": 6, "trackers": []},
                "checkpoint": {"save_steps": 0, "best": None},
            },
            train_dataset=_rows(length, 256, 100 * length),
        )
        with contextlib.redirect_stdout(io.StringIO()):
            line = subject.fit().train[-1]
    return {
        "step_seconds": figure(line["step_seconds"], "s"),
        "tokens_per_second": figure(line["tokens_per_second"], "tokens/s"),
        "tflops_per_device": figure(line["tflops_per_device"], "TFLOP/s"),
        "mfu": figure(line["mfu"], "of the device's peak, causal convention"),
        "mfu_legacy": figure(line["mfu_legacy"], "of the device's peak, 6N + 12 L H s"),
    }


def _rows(length: int, vocabulary: int, tokens: int) -> TrainRows:
    """Random documents, packed."""
    generator = np.random.default_rng(0)
    sizes = np.minimum(generator.lognormal(np.log(400), 1.0, size=max(tokens // 600, 8)).astype(int) + 2, 4 * length)
    sizes = sizes[: max(int(np.searchsorted(np.cumsum(sizes), tokens)), 8)]
    ids = generator.integers(0, vocabulary, int(sizes.sum()))
    store = TokenStore.from_documents(np.split(ids, np.cumsum(sizes)[:-1]))
    return TrainRows([PackedRows(store, plan_rows(store.edges, length, "best_fit"))], seed=0)


def _small(folder: Path, *, max_steps: int) -> dict[str, Any]:
    """A decoder whose step takes some tens of milliseconds on two cores, on one device."""
    return {
        "run_dir": str(folder / "run"),
        "max_steps": max_steps,
        "max_length": 128,
        "global_batch_size": 4,
        "precision": "32-true",
        "devices": 1,
        "model": {"preset": "llama-tiny", "remat": "none", "vocab_size": 1024, "num_hidden_layers": 2},
        "checkpoint": {"save_steps": 0, "best": None},
        "logging": {"trackers": [], "level": "warning"},
    }


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="jtrain-bench-") as name:
        yield Path(name)


def _timed(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"JAX_COMPILATION_CACHE_DIR": ""})
    return time.perf_counter() - started
