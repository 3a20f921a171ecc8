import time

from jtrain.observe.metrics import Events, MetricsLog, read_events, read_metrics


def test_every_line_has_step_split_and_time(tmp_path):
    before = time.time()
    MetricsLog(tmp_path).log(3, "train", {"loss": 2.5, "mfu": None, "step": 9.0, "split": 9.0, "time": 9.0})
    (line,) = read_metrics(tmp_path)
    assert before <= line.pop("time") <= time.time()
    assert line == {"step": 3, "split": "train", "loss": 2.5, "mfu": None}


def test_the_last_line_of_a_step_counts_and_train_stands_before_eval(tmp_path):
    log = MetricsLog(tmp_path)
    for step, split, loss in [
        (1, "train", 5.0),
        (2, "eval", 9.0),
        (2, "train", 4.0),
        (2, "train", 3.5),
        (1, "eval", 8.0),
    ]:
        log.log(step, split, {"loss": loss})
    log.close()
    assert [(x["step"], x["split"], x["loss"]) for x in read_metrics(tmp_path)] == [
        (1, "train", 5.0),
        (1, "eval", 8.0),
        (2, "train", 3.5),
        (2, "eval", 9.0),
    ]
    assert [x["loss"] for x in read_metrics(tmp_path, "eval")] == [8.0, 9.0]


def test_a_run_without_metrics_has_none(tmp_path):
    assert read_metrics(tmp_path) == [] and read_events(tmp_path) == []


def test_events_keep_their_order_and_fields(tmp_path):
    events = Events(tmp_path)
    events.emit("start", mesh={"data": 2})
    events.emit("durable", step=100)
    events.close()
    assert [x["event"] for x in read_events(tmp_path)] == ["start", "durable"]
    assert read_events(tmp_path, "start")[0]["mesh"] == {"data": 2}
    assert read_events(tmp_path, "durable")[0]["step"] == 100
