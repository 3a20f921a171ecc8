"""The families on meshes: loss and gradients of a training step are still those of transformers."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from jtrain.models.decoder import Decoder
from jtrain.parallel.sharding import make_rules, pipeline_rules
from jtrain.tasks.pretrain import pretrain_loss
from jtrain.train.gradients import accumulated_gradients
from jtrain.train.model import functional_model
from jtrain.train.pipelined import Pipeline, pipelined_gradients
from jtrain.train.state import plan_state
from jtrain.train.step import jit

from ..build import mesh
from .folders import folder, model
from .test_parity import check_gradients

CASES = [
    ("gemma2", {"fsdp": 2, "tensor": 2}),
    ("gpt-oss", {"fsdp": 2, "tensor": 2}),
    ("deepseek-v3", {"fsdp": 2, "tensor": 2}),
    ("phi3-short", {"fsdp": 2, "tensor": 2}),
    ("gpt2", {"fsdp": 2, "tensor": 2}),
    ("olmo2", {"tensor": 4}),
    ("gemma2", {"pipeline": 2}),
    ("deepseek-v3", {"pipeline": 2}),
    ("gemma2", {"context": 2}),
    ("gpt-oss", {"context": 2}),
    ("gpt-oss", {"expert": 2, "tensor": 2}),
    ("gemma3-text", {"context": 2, "pipeline": 2}),
]
SMOKE = [("gemma2", {"fsdp": 2, "tensor": 2})]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [case if case in SMOKE else pytest.param(*case, marks=pytest.mark.grid) for case in CASES],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{axis}{n}" for axis, n in value.items()),
)
def test_loss_and_gradients_are_those_of_transformers(name, sizes):
    one = folder(name)
    config = one.config.replace(router_aux_loss_coef=0.0) if one.config.num_experts else one.config
    split = functional_model(lambda rngs: Decoder(config, rngs))
    stages = sizes.get("pipeline", 1)
    rules = make_rules() if stages == 1 else pipeline_rules(make_rules(), 1)
    plan = plan_state(split, optax.identity(), mesh(**sizes), rules)
    if stages == 1:
        gradients = accumulated_gradients(split, pretrain_loss(), plan)
    else:
        gradients = pipelined_gradients(split, pretrain_loss(), plan, Pipeline("gpipe", stages, 2))

    ours = model(one)
    params = jax.tree.map(jax.device_put, ours.params, plan.shardings.params)
    ids, mask, _ = one.batch
    batch = {"input_ids": ids, "labels": one.oracle["labels"].astype(np.int32), "segment_ids": mask}
    batch |= {"position_ids": np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)}
    batch |= {"row": np.arange(len(ids), dtype=np.int32)}
    step = jit(gradients, plan, {"xla_backend_optimization_level": 0})
    summed, loss, _ = step(
        params, ours.variables, {key: value[None] for key, value in batch.items()}, jax.random.key(0), np.float32(1)
    )
    assert float(loss.sum / loss.count) == pytest.approx(float(one.oracle["loss"][0]), abs=1e-5)
    check_gradients(one, jax.tree.map(lambda g: np.asarray(g) / float(loss.count), summed))
