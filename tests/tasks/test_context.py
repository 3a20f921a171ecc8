"""Rows on several devices in the pretraining task: what is refused, and what the log says."""

import pytest

from jtrain import PretrainTrainer
from jtrain.errors import ConfigError

TEXTS = [{"text": "a quick brown fox " * 3} for _ in range(20)]
BASE = {
    "max_steps": 1,
    "max_length": 32,
    "global_batch_size": 8,
    "accelerator": "cpu",
    "devices": 8,
    "compile_cache": "",
    "model": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
    "checkpoint": {"best": None},
}


def trainer(folder, **changes):
    return PretrainTrainer({**BASE, "run_dir": str(folder), **changes}, train_dataset=TEXTS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"mesh": "data=1,context=8", "context": {"method": "ulysses"}},
            ["4 query heads = 4 over mesh.context=8 leave a remainder", "mesh.context: 4"],
        ),
        (
            {"mesh": "data=1,context=4,tensor=2", "context": {"method": "ulysses"}},
            ["4 query heads / 2 (mesh.tensor) = 2 over mesh.context=4", "mesh.context: 2"],
        ),
        ({"mesh": "data=1,context=8", "max_length": 40}, ["40 / 2 x 8 mesh.context = 16 chunks = 2.5", "32 or 48"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_nearest_that_does(changes, words, tmp_path):
    with pytest.raises(ConfigError) as refusal:
        trainer(tmp_path, **changes)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_the_log_says_how_tokens_meet(tmp_path):
    found = [
        trainer(tmp_path, mesh=mesh, context=context).kernel
        for mesh, context in (
            ("data=1,context=8", {}),
            ("data=2,context=4", {"layout": "contiguous", "method": "ring"}),
            ("data=4,context=2", {}),
            ("data=8", {}),
        )
    ]
    assert found == [
        "ring over context=8, zigzag",
        "ring over context=4, contiguous",
        "ulysses over context=2, xla",
        "xla",
    ]
