"""A run that begins with a model on disk: its weights, shape and tokenizer, what contradicts it, and what is kept."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jtrain import PretrainTrainer, load_config
from jtrain.tasks.source import ModelSource
from tests.checkpoint.hf.folders import write_folder

TEXTS = [{"text": f"in the beginning was word number {n} " * 2} for n in range(24)]
QUICK = {"xla_backend_optimization_level": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    return path, write_folder(path, template=True)


def settings(path, run_dir, **changes):
    fields = {
        "run_dir": str(run_dir),
        "max_steps": 2,
        "global_batch_size": 8,
        "precision": "32-true",
        "compile_cache": "",
        "accelerator": "cpu",
        "devices": 1,
        "model.path": str(path),
        "data.cache_dir": str(run_dir.parent / "cache"),
        "checkpoint.save_steps": 1,
        "checkpoint.best": None,
        "logging.trackers": (),
        "xla_options": QUICK,
    }
    return fields | changes


def trainer(path, run_dir, **changes):
    return PretrainTrainer(settings(path, run_dir, **changes), train_dataset=TEXTS)


def layer_zero(tensors, name):
    """q_proj of the first layer as we keep it: [D, H, Dh]."""
    return tensors[f"model.layers.0.self_attn.{name}.weight"].T.reshape(16, 4, 4)


@pytest.mark.parametrize("mesh", [{}, {"devices": 4, "mesh": "pipeline=2,fsdp=2"}, {"devices": 2, "strategy": "zero1"}])
def test_a_run_begins_with_the_weights_of_the_folder(folder, mesh, tmp_path):
    path, tensors = folder
    made = trainer(path, tmp_path / "run", **mesh)
    state = made.state
    np.testing.assert_array_equal(state.params["embed_tokens"]["embedding"], tensors["model.embed_tokens.weight"])
    q = state.params["layers"]["attention"]["q_proj"]["kernel"]
    np.testing.assert_array_equal(np.asarray(q)[0], layer_zero(tensors, "q_proj"))
    planned = jax.tree.map(lambda leaf: leaf.sharding, made.plan.abstract.params)
    assert jax.tree.map(lambda leaf: leaf.sharding, state.params) == planned


def test_shape_tokenizer_and_length_come_from_the_folder(folder, tmp_path):
    path, _ = folder
    source = ModelSource(load_config(settings(path, tmp_path / "run")))
    assert source.decoder.vocab_size == 264 and source.tokenizer.vocab_size == 259
    assert source.config.max_length == 64  # max_position_embeddings, below the default of 1024
    assert source.tokenizer.encode_batch(["ab"]) == [[97, 98]]
