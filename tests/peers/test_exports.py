"""What jtrain exports, `transformers` loads: every key, the same logits, the same ids.

JTRAIN_PEERS_PYTHON names the interpreter of an environment with torch and transformers; by default this one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jtrain import PretrainTrainer, load_model
from jtrain.data.tokenizers import ByteTokenizer
from jtrain.models.config import DecoderConfig
from jtrain.tasks.exporting import export
from jtrain.tasks.loaded import drawn

pytestmark = [pytest.mark.peers, pytest.mark.timeout(3600)]

FIXTURES = Path(__file__).parents[1] / "models" / "families" / "fixtures"
TEXTS = ["In the beginning  was\n\tthe word: 東京 🙂", "plain"]


@pytest.fixture(scope="module")
def interpreter():
    given = os.environ.get("JTRAIN_PEERS_PYTHON")
    if given is None and not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        pytest.skip("set JTRAIN_PEERS_PYTHON to a Python with torch and transformers")
    return given or sys.executable


@pytest.fixture(scope="module")
def cases(interpreter, tmp_path_factory):
    """name -> (our logits, theirs), and the request."""
    base = tmp_path_factory.mktemp("exports")
    request, ours = {}, {}
    for folder in sorted(path for path in FIXTURES.iterdir() if path.is_dir()):
        model = load_model(folder)
        # Other weights than those of the folder: a step of training, in short.
        model = model.with_weights(jax.tree.map(lambda x: x * 1.03 + 0.01, model.params), model.variables)
        add(request, ours, base, folder.name, model)
    born = drawn(DecoderConfig(264, 32, 48, 2, 4), tokenizer=ByteTokenizer())
    add(request, ours, base, "born with bytes", born, TEXTS)
    add(request, ours, base, "trained", trained(base))
    request["bfloat16 in shards"] = request["llama"] | {"folder": str(base / "narrow")}
    narrow = load_model(base / "llama")
    export(narrow, base / "narrow", dtype="bfloat16", max_shard_size="20KB")
    ours["bfloat16 in shards"] = np.asarray(load_model(base / "narrow")(request["llama"]["ids"]))
    (base / "request.json").write_text(json.dumps(request))
    script = Path(__file__).parent / "transformers_logits.py"
    subprocess.run([interpreter, script, base / "request.json", base / "found.safetensors"], check=True)
    return request, ours, load_file(base / "found.safetensors")


def add(request, ours, base, name, model, texts=()):
    export(model, base / name)
    ids = np.random.default_rng(1).integers(0, model.decoder.vocab_size, (2, 48))  # as export: compiled once
    request[name] = {"folder": str(base / name), "ids": ids.tolist(), "texts": list(texts)}
    ours[name] = np.asarray(model(ids))


def trained(base):
    """Import, one step, and back."""
    rows = np.random.default_rng(0).integers(0, 90, (8, 32)).astype(np.int32)
    arrays = {
        "input_ids": rows,
        "labels": rows,
        "segment_ids": np.ones_like(rows),
        "position_ids": np.broadcast_to(np.arange(32, dtype=np.int32), rows.shape),
    }
    (base / "tiny.json").write_text(json.dumps(tokenizer()))
    config = {
        "run_dir": str(base / "run"),
        "model": {"path": str(FIXTURES / "qwen3")},
        "data": {"tokenizer": str(base / "tiny.json")},
        "max_steps": 1,
        "max_length": 32,
        "global_batch_size": 8,
        "precision": "32-true",
        "accelerator": "cpu",
        "devices": 4,
        "mesh": "fsdp=2,tensor=2",
        "optimizer": {"learning_rate": 0.05},
        "schedule": {"name": "constant", "warmup_steps": 0},
    }
    PretrainTrainer(config, train_dataset=arrays).fit()
    return load_model(base / "run")


def tokenizer():
    vocabulary = {chr(97 + n): n for n in range(26)}
    return {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}


NAMES = [path.name for path in sorted(FIXTURES.iterdir()) if path.is_dir()]


@pytest.mark.parametrize("name", [*NAMES, "born with bytes", "trained", "bfloat16 in shards"])
def test_transformers_gives_the_same_logits(cases, name):
    _, ours, theirs = cases
    reference = theirs[f"{name}.logits"]
    assert np.abs(ours[name] - reference).max() < 2e-4 * np.ptp(reference)


def test_transformers_gives_the_same_ids(cases):
    for n, text in enumerate(TEXTS):
        assert cases[2][f"born with bytes.text.{n}"].tolist() == list(text.encode())
