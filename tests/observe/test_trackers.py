import logging
import threading
import time

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jtrain.observe.trackers import Trackers


class Recorder:
    def __init__(self, fail_at=None):
        self.lines, self.closed, self.fail_at = [], False, fail_at

    def log(self, step, split, values):
        if step == self.fail_at:
            raise RuntimeError("server away")
        self.lines.append((step, split, dict(values)))

    def close(self):
        self.closed = True


def test_tensorboard_reads_back_what_was_logged_and_leaves_unknown_figures_out(tmp_path):
    trackers = Trackers(["tensorboard"], tmp_path)
    trackers.log(1, "train", {"loss": 2.5, "mfu": None, "grad_norm": float("nan")})
    trackers.log(2, "train", {"loss": 2.25})
    trackers.log(2, "eval", {"eval_loss": 3})
    trackers.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["eval/eval_loss", "train/loss"]
    assert [(x.step, x.value) for x in events.Scalars("train/loss")] == [(1, 2.5), (2, 2.25)]


def test_tensorboard_reads_texts_back(tmp_path):
    trackers = Trackers(["tensorboard"], tmp_path)
    trackers.log_text(3, "samples/0", "prompt: 猫\n\ncompletion: a cat")
    trackers.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    (found,) = events.Tensors("samples/0")
    assert events.SummaryMetadata("samples/0").plugin_data.plugin_name == "text"
    assert (found.step, found.tensor_proto.string_val[0].decode()) == (3, "prompt: 猫\n\ncompletion: a cat")


def test_a_failing_tracker_is_dropped_with_a_warning_and_the_others_go_on(tmp_path, caplog, monkeypatch):
    good, bad = Recorder(), Recorder(fail_at=2)
    monkeypatch.setattr("jtrain.observe.trackers.TRACKERS", {"bad": lambda _: bad, "good": lambda _: good})
    trackers = Trackers(["bad", "good"], tmp_path)
    with caplog.at_level(logging.WARNING, logger="jtrain"):
        for step in (1, 2, 3):
            trackers.log(step, "train", {"loss": 1.0})
        while trackers.names != ("good",) or len(good.lines) < 3:  # each has its own thread
            time.sleep(0.01)
    assert [line[0] for line in good.lines] == [1, 2, 3] and [line[0] for line in bad.lines] == [1]
    assert trackers.names == ("good",)
    assert len(caplog.records) == 1 and "server away" in caplog.text
    trackers.close()
    assert good.closed


def test_a_tracker_that_cannot_be_opened_does_not_stop_the_run(tmp_path, caplog):
    (tmp_path / "tb").write_text("a file where a folder should be")
    assert Trackers(["tensorboard"], tmp_path).names == ()
    assert "tensorboard" in caplog.text


def test_m1_a_tracker_that_hangs_holds_nobody_up_and_is_not_waited_for(tmp_path, caplog, monkeypatch):
    over = threading.Event()

    class Hangs(Recorder):
        def log(self, step, split, values):
            over.wait(60)

    good = Recorder()
    monkeypatch.setattr("jtrain.observe.trackers.TRACKERS", {"hangs": lambda _: Hangs(), "good": lambda _: good})
    monkeypatch.setattr("jtrain.observe.trackers.CLOSE_SECONDS", 0.2)
    monkeypatch.setattr("jtrain.observe.trackers.WAITING_CALLS", 50)
    trackers = Trackers(["hangs", "good"], tmp_path)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="jtrain"):
        for step in range(40):
            trackers.log(step, "train", {"loss": 1.0})
        trackers.close()
    assert time.monotonic() - began < 20
    assert [line[0] for line in good.lines] == list(range(40)) and good.closed
    assert "hangs has not ended in 0.2 s" in caplog.text
    over.set()
