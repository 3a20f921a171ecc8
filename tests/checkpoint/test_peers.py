"""Two processes with four devices each: they save together, fail together and restore together."""

import jax
import numpy as np
import pytest
from checkpoint_states import make_mesh
from jax.sharding import NamedSharding, PartitionSpec
from two_process_worker import SHAPE, values

from jtrain.checkpoint import Checkpoints, peers
from tests.checkpoint.two_processes import answers_of_two


def test_a_single_process_talks_to_itself():
    assert (peers.count(), peers.index()) == (1, 0)
    assert peers.exchange("topic", {"a": 1}) == [{"a": 1}]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    run = tmp_path_factory.mktemp("two")
    return run, answers_of_two("two_process_worker.py", run)


def test_both_processes_see_the_same_saves_failures_and_restores(two):
    run, answers = two
    for answer in answers:
        assert answer["durable"] == 2
        assert answer["steps"] == [1, 2, 3]
        assert len(answer["failures"]) == 3 and all("No space left" in message for message in answer["failures"])
        assert answer["restored"] == [True, {"step": 3}]
        assert answer["fallback"] == [True, {"step": 2}, 2]
        assert str(run) in answer["lock"] and "in use by process" in answer["lock"]
        assert answer["seconds"] < 60  # Orbax would wait ten minutes for the one that could not write
    assert answers[0]["run_id"] == answers[1]["run_id"]
    assert answers[0]["events"].count("durable") == 3 and answers[0]["events"].count("save_failed") == 3
    assert answers[1]["events"] == []  # process 0 speaks for all


def test_what_two_processes_saved_one_process_restores_onto_another_mesh(two):
    run, _ = two
    sharding = NamedSharding(make_mesh(2, 4, 1), PartitionSpec(None, "fsdp"))
    abstract = {k: jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding) for k in ("w", "replicated")}
    state, meta, step = Checkpoints(run, read_only=True).restore(abstract)
    assert (meta, step) == ({"step": 2}, 2)
    for array in state.values():
        np.testing.assert_array_equal(array, values(2))
