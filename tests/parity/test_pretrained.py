"""Two processes begin with the weights of a folder: each its own shards, and of a pipeline its own layers."""

import numpy as np
import pytest

from jtrain import load_model
from jtrain.tasks.exporting import export
from tests.checkpoint.hf.folders import write_folder
from tests.parity.launch import start_several, wait_all
from tests.parity.runs import settings, write_corpus

pytestmark = pytest.mark.grid


def test_every_process_has_the_shards_of_the_folder(tmp_path):
    tensors = write_folder(tmp_path / "model")
    config = settings(
        write_corpus(tmp_path),
        tmp_path / "run",
        devices=4,
        max_steps=1,
        mesh={"data": 1, "pipeline": 2, "tensor": 2},
        gradient_accumulation_steps=1,
    )
    config["model"] = {"path": str(tmp_path / "model")}
    running = start_several(config, "process", [("dump", 0)] * 2)
    assert wait_all(running) == [0, 0], "".join(one.err for one in running)

    layers = [tensors[f"model.layers.{n}.self_attn.q_proj.weight"].T.reshape(16, 4, 4) for n in range(2)]
    seen = set()
    for process in range(2):
        shards = np.load(tmp_path / f"initial-{process}.npz")
        names = [name for name in shards.files if name.startswith("['layers']['attention']['q_proj']['kernel']")]
        for name in names:
            layer, _, head, _ = map(int, name.partition("|")[2].split(","))
            assert layer == process  # a stage each
            np.testing.assert_array_equal(shards[name], np.asarray(layers)[layer : layer + 1, :, head : head + 2])
            seen.add((layer, head))
    assert seen == {(0, 0), (0, 2), (1, 0), (1, 2)}
    assert export(load_model(tmp_path / "run"), tmp_path / "out").difference == 0.0
