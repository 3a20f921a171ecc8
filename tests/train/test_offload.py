"""Host memory for the state, and the TPU kernels, as the TPU's compiler sees them; no TPU is needed, libtpu is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("libtpu", reason="pip install '.[tpu]' brings the TPU's compiler")

CONFIG = {
    "max_steps": 100,
    "max_length": 256,
    "global_batch_size": 8,
    "precision": "bf16-mixed",
    "mesh": {"data": 1, "fsdp": 4},
}
SHAPE = {
    "name": "llama-15m",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 256,
}


def compiled(sharding: dict, remat: str = "full", mesh: dict | None = None, **shape) -> dict:
    config = CONFIG | {"sharding": sharding, "mesh": mesh or CONFIG["mesh"]}
    given = {"config": config, "shape": SHAPE | {"remat": remat} | shape}
    script = Path(__file__).with_name("tpu_compile.py")
    done = subprocess.run(
        [sys.executable, str(script), "v5e:2x2", json.dumps(given)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_optimizer_state_then_parameters_move_from_the_device_to_the_host():
    plain = compiled({})
    optimizer = compiled({"offload_optimizer": True})
    both = compiled({"offload_optimizer": True, "offload_parameters": True})
    assert plain["host_argument_bytes"] == 0
    # Adam: two moments of the parameters' size. Arrays are padded to tiles, hence the tolerance.
    assert optimizer["host_argument_bytes"] == pytest.approx(plain["argument_bytes"] * 2 / 3, rel=0.02)
    assert optimizer["argument_bytes"] == pytest.approx(plain["argument_bytes"] / 3, rel=0.02)
    assert both["argument_bytes"] < 0.02 * plain["argument_bytes"]


def test_the_offload_policy_keeps_activations_on_the_host():
    assert compiled({}, remat="offload")["host_temporary_bytes"] > 0


def test_splash_attention_is_in_the_program_of_a_tpu():
    assert compiled({})["splash"] > 0


def test_experts_run_by_megablox_and_tokens_travel_by_a_ragged_exchange_on_a_tpu():
    experts = {"num_experts": 8, "moe_intermediate_size": 256}
    found = compiled({}, mesh={"data": 1, "fsdp": 2, "expert": 2}, **experts)
    assert found["gmm"] > 0
    # There and back: forward, again for the backward pass, and backward.
    assert found["ragged_all_to_all"] == 6
