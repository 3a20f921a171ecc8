"""Going back: the run that went back has the bits of one whose data never held the batches that were left out."""

import dataclasses
import json
import math

import numpy as np
import pytest

from jtrain.checkpoint import Checkpoints
from jtrain.errors import CheckpointError, NumbersError
from jtrain.observe.metrics import read_events, read_metrics
from jtrain.train.callbacks import Callback
from jtrain.train.rollback import Rollbacks, windows_of
from tests.train.fits import BATCH, checkpoints, examples, make

FIELDS = {
    "max_steps": 16,
    "checkpoint": {"save_steps": 4, "save_total_limit": None},
    "logging": {"log_every_n_steps": 1},
    "faults": {"spike": "rollback", "spike_window": 8, "spike_threshold": 30.0},
}


def rows(bad=(), factor=100.0, count=32):
    """Batches in order; those that are `bad` have targets that are far too large."""
    data = examples(count * BATCH)
    for number in bad:
        data["y"][number * BATCH : (number + 1) * BATCH] *= factor
    return data


def without(data, first, end):
    """The rows of all batches but [first, end)."""
    return {name: np.delete(values, slice(first * BATCH, end * BATCH), 0) for name, values in data.items()}


def fields(**faults):
    return FIELDS | {"faults": FIELDS["faults"] | faults}


def weights(trainer):
    return {name: np.asarray(value) for name, value in trainer.state.params.items()}


def same_as(trainer, reference):
    assert trainer.counters.step == reference.counters.step
    for name, value in weights(trainer).items():
        np.testing.assert_array_equal(value, weights(reference)[name])


def lines(folder):
    """Losses and norms by step; the last line of a step counts."""
    return [(line["step"], line["loss"], line["grad_norm"], line["learning_rate"]) for line in read_metrics(folder)]


def test_b2_a_spike_takes_the_run_back_and_it_goes_on_behind_it(tmp_path):
    data = rows(bad=[10])
    trainer = make(tmp_path / "run", rows=data, **fields(rollback_margin=2))
    trainer.fit()
    (event,) = read_events(tmp_path / "run", "rollback")
    # Back to step 8, at batch 8; left out are batches 8 and 9, the spike 10, and 11 and 12 behind it.
    assert (event["step"], event["from_step"], event["first"], event["end"]) == (8, 10, 8, 13)
    assert "a spike after step 10" in event["reason"] and event["loss"] > 100
    reference = make(tmp_path / "reference", rows=without(data, 8, 13), **fields())
    reference.fit()
    assert read_events(tmp_path / "reference", "rollback") == []
    same_as(trainer, reference)
    assert lines(tmp_path / "run") == lines(tmp_path / "reference")
    assert (trainer.counters.skipped, trainer.counters.examples) == (5, 16 * BATCH)
    assert int(trainer.state.skipped) == 5


def test_lost_updates_are_lost_work(tmp_path):
    class Slow(Callback):
        def on_step_start(self, trainer, step):
            import time

            time.sleep(0.05)

    trainer = make(tmp_path, [Slow()], rows=rows(bad=[11]), **fields())
    trainer.fit()
    account = read_events(tmp_path, "goodput")[-1]
    assert 3 * 0.05 <= account["seconds"]["lost_work"] < account["seconds"]["step"]
    assert math.isclose(sum(account["seconds"].values()), account["wall_seconds"], rel_tol=0.01)


@pytest.mark.faults
def test_b2_a_second_spike_on_the_way_takes_it_back_once_more(tmp_path):
    data = rows(bad=[10, 13])
    trainer = make(tmp_path / "run", rows=data, **fields())
    trainer.fit()
    found = [(e["step"], e["first"], e["end"]) for e in read_events(tmp_path / "run", "rollback")]
    assert found == [(8, 8, 11), (8, 8, 14)]
    reference = make(tmp_path / "reference", rows=without(data, 8, 14), **fields())
    reference.fit()
    same_as(trainer, reference)


class Dies(Exception):
    pass


class DieAt(Callback):
    """Ends the program, without a save, where update `step` is to begin for the `time`th time."""

    def __init__(self, step, time):
        self.step, self.left = step, time

    def on_step_start(self, trainer, step):
        self.left -= step == self.step
        if step == self.step and self.left == 0:
            raise Dies


@pytest.mark.parametrize("torn", (False, pytest.param(True, marks=pytest.mark.faults)))
@pytest.mark.parametrize(
    ("step", "time"), [(9, 2), *(pytest.param(*p, marks=pytest.mark.faults) for p in [(11, 2), (14, 1)])]
)
def test_b2_a_run_that_dies_behind_a_rollback_goes_the_same_way_again(step, time, torn, tmp_path):
    data = rows(bad=[10])
    whole = make(tmp_path / "whole", rows=data, **fields())
    whole.fit()
    with pytest.raises(Dies):
        make(tmp_path / "parts", [DieAt(step, time)], rows=data, **fields()).fit()
    if torn:  # the line of the rollback was never written
        path = tmp_path / "parts" / "events.jsonl"
        kept = [line for line in path.read_text().splitlines() if json.loads(line)["event"] != "rollback"]
        path.write_text("\n".join(kept) + "\n")
    again = make(tmp_path / "parts", rows=data, **fields())
    again.fit()
    same_as(again, whole)
    assert dataclasses.asdict(again.counters) == dataclasses.asdict(whole.counters)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert again.rollbacks.windows == whole.rollbacks.windows


def test_b2_a_run_that_falls_back_to_an_older_step_passes_the_same_window(tmp_path):
    data = rows(bad=[10])
    whole = make(tmp_path, rows=data, **fields())
    whole.fit()
    again = make(tmp_path, rows=data, **fields() | {"checkpoint": FIELDS["checkpoint"] | {"resume": 4}})
    again.fit()
    assert len(read_events(tmp_path, "rollback")) == 1
    same_as(again, whole)


@pytest.mark.parametrize("bad", (np.nan, pytest.param(1e6, marks=pytest.mark.faults)))
def test_b3_numbers_that_stay_bad_end_the_run_after_k_rollbacks(bad, tmp_path):
    bad_rows = rows(bad=range(10, 32), factor=bad)
    trainer = make(tmp_path, rows=bad_rows, **fields(max_consecutive_skips=2, max_rollbacks=3))
    with pytest.raises(NumbersError, match="gone back to step 8 3 times") as caught:
        trainer.fit()
    assert caught.value.exit_code == 15
    assert "jtrain replay" in caught.value.remedy
    ends = [(e["step"], e["first"], e["end"]) for e in read_events(tmp_path, "rollback")]
    # Not finite: batches 10 and 11 are skipped, which is one too many; then 12 and 13, ... A spike: one is enough.
    assert ends == [(8, 8, 12), (8, 8, 14), (8, 8, 16)] if math.isnan(bad) else [(8, 8, 11), (8, 8, 12), (8, 8, 13)]
    assert checkpoints(tmp_path) == [4, 8]
    events = len(read_events(tmp_path, "rollback"))
    with pytest.raises(NumbersError, match="3 times"):  # until something changes
        make(tmp_path, rows=bad_rows, **fields(max_consecutive_skips=2)).fit()
    assert len(read_events(tmp_path, "rollback")) == events
    more = make(tmp_path, rows=bad_rows, **fields(max_consecutive_skips=2, max_rollbacks=30))
    more.fit()  # over all of the bad ones, into the next epoch
    assert more.counters.step == 16


def test_b1_too_many_in_a_row_take_the_run_back_without_spikes_being_looked_for(tmp_path):
    data = rows(bad=[10, 11], factor=np.nan)
    plain = FIELDS | {"faults": {"max_consecutive_skips": 2}}
    trainer = make(tmp_path / "run", rows=data, **plain)
    trainer.fit()
    assert [(e["step"], e["first"], e["end"]) for e in read_events(tmp_path / "run", "rollback")] == [(8, 8, 12)]
    reference = make(tmp_path / "reference", rows=without(data, 8, 12), **plain)
    reference.fit()
    same_as(trainer, reference)


def test_no_rollback_without_a_checkpoint_or_where_the_config_forbids_it(tmp_path):
    early = make(tmp_path / "early", rows=rows(bad=[5]), **fields() | {"checkpoint": {"save_steps": 0}})
    with pytest.raises(NumbersError, match="a spike after step 5"):
        early.fit()
    never = make(tmp_path / "never", rows=rows(bad=[10]), **fields(max_rollbacks=0))
    with pytest.raises(NumbersError, match="a spike after step 10"):
        never.fit()
    assert np.isfinite(never.state.params["w"]).all()


def test_a_skip_in_a_row_is_counted_over_a_resume(tmp_path):
    data = rows(bad=range(8, 12), factor=np.nan)
    plain = FIELDS | {"faults": {"max_consecutive_skips": 4, "max_rollbacks": 0}, "max_steps": 12}

    class SaveAt(Callback):
        def __init__(self, batch):
            self.batch, self.seen = batch, -1

        def on_step_start(self, trainer, step):
            self.seen += 1
            if self.seen == self.batch:
                trainer.request_stop("the test says so")

    plain = plain | {"checkpoint": {"save_steps": 0}}
    make(tmp_path, [SaveAt(10)], rows=data, **plain).fit()  # batches 8 to 10 were skipped
    again = make(tmp_path, rows=data, **plain)
    with pytest.raises(NumbersError, match="4 batches in a row"):
        again.fit()
    assert len(read_events(tmp_path, "skipped_step")) == 4


@pytest.mark.parametrize("mesh", (pytest.param("data=2", marks=pytest.mark.faults), "fsdp=4"))
def test_b2_every_mesh_goes_back_alike(mesh, tmp_path):
    devices = 2 if mesh == "data=2" else 4
    trainer = make(tmp_path, rows=rows(bad=[10]), mesh=mesh, **fields() | {"devices": devices})
    trainer.fit()
    assert [(e["step"], e["first"], e["end"]) for e in read_events(tmp_path, "rollback")] == [(8, 8, 11)]


@pytest.mark.faults
def test_b2_a_damaged_checkpoint_is_passed_over_on_the_way_back(tmp_path):
    data = rows(bad=[10])

    class Damage(Callback):
        def on_step_end(self, trainer, step, metrics):
            if step == 10:
                trainer.wait()
                path = next(p for p in (tmp_path / "checkpoints/8/state/d").iterdir() if p.stat().st_size > 100)
                content = bytearray(path.read_bytes())
                content[50] ^= 1
                path.write_bytes(bytes(content))

    trainer = make(tmp_path, [Damage()], rows=data, **fields())
    trainer.fit()
    assert [(e["step"], e["first"], e["end"]) for e in read_events(tmp_path, "rollback")] == [(4, 4, 11)]
    assert [e["step"] for e in read_events(tmp_path, "corrupt")] == [8]


@pytest.mark.faults
def test_spikes_can_be_looked_for_from_the_middle_of_a_run_on_and_no_more_later(tmp_path):
    data = rows(bad=[10])
    make(tmp_path, rows=data, **FIELDS | {"max_steps": 4, "faults": {}}).fit()
    make(tmp_path, rows=data, **FIELDS | {"max_steps": 12}).fit()
    assert len(read_events(tmp_path, "rollback")) == 1
    last = make(tmp_path, rows=data, **FIELDS | {"faults": {}})
    last.fit()
    assert last.counters.step == 16 and last.state.numbers is None


def test_only_steps_of_the_runs_own_line_are_gone_back_to(tmp_path):
    with Checkpoints(tmp_path) as first:
        for step in (2, 4, 6):
            first.save(step, {"a": np.float32(step)}, {})
    with Checkpoints(tmp_path) as again:
        import jax

        wanted = {"a": jax.ShapeDtypeStruct((), np.float32)}
        assert again.own_steps() == []
        again.restore(wanted, 4)
        assert again.own_steps() == [2, 4]  # 6 lies ahead, on another line
        with pytest.raises(CheckpointError):
            again.restore(wanted, among=[5])
        assert again.restore(wanted, among=[2, 5])[2] == 2


def test_windows_are_passed_where_they_begin_and_nowhere_else():
    known = Rollbacks([[8, 11, 8], [8, 14, 8], [14, 15, 12]])
    assert [known.beyond(batch) for batch in (7, 8, 9, 14, 15)] == [7, 15, 9, 15, 15]
    assert [known.count(step) for step in (4, 8, 12)] == [0, 2, 1]
    known.add(known.windows)
    assert known.count(8) == 2
    assert windows_of([{"event": "save", "step": 1}, {"event": "rollback", "step": 8, "first": 8, "end": 11}]) == [
        [8, 11, 8]
    ]
