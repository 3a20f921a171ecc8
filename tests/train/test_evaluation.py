import math

import jax
import numpy as np
import pytest

from jtrain.data.arrays import ArrayRows
from jtrain.errors import ConfigError
from jtrain.train.evaluation import FilledRows, perplexity
from tests.train.fits import examples, make

N = 21


def by_hand(params, data):
    """Mean squared and mean absolute error over all rows, in float64."""
    params = jax.device_get(params)
    error = np.float64(data["x"]) @ np.float64(params["w"]) + np.float64(params["b"]) - np.float64(data["y"])
    return {"eval_loss": (error**2).mean(), "eval_absolute": np.abs(error).mean()}


@pytest.mark.parametrize("devices", (1, 8))
def test_every_row_counts_once_whatever_the_batch_and_the_mesh(devices, tmp_path):
    counts = set()
    for batch_size in (1, 4, 8):
        trainer = make(
            tmp_path,
            devices=devices,
            eval={"batch_size": batch_size},
            compute_metrics=lambda sums: counts.add(sums["loss"][1]) or {},
        )
        expected = by_hand(trainer.state.params, examples(N, seed=1))
        assert trainer.evaluate(examples(N, seed=1)) == pytest.approx(expected, rel=1e-6)
    assert counts == {float(N)}


@pytest.mark.parametrize("computed", (3, {"a": "x"}, None))
def test_computed_metrics_are_numbers_by_name(computed, tmp_path):
    with pytest.raises(ConfigError, match="compute_metrics returned"):
        make(tmp_path, devices=1, compute_metrics=lambda sums: computed).evaluate(examples(N, seed=1))


def test_a_limit_means_the_same_rows_on_every_mesh(tmp_path):
    data = examples(N, seed=1)
    found = [
        make(tmp_path, devices=devices, eval={"batch_size": 3, "max_batches": 2}).evaluate(data) for devices in (1, 8)
    ]
    trainer = make(tmp_path)
    expected = by_hand(trainer.state.params, {name: values[:6] for name, values in data.items()})
    assert found[0] == pytest.approx(expected, rel=1e-6) and found[1] == pytest.approx(expected, rel=1e-6)


def test_filling_stands_behind_the_rows_of_each_batch_and_counts_for_nothing():
    rows = FilledRows(ArrayRows({"x": np.arange(5)}, once=True), 3, 4)
    batch = rows.rows(np.arange(8))
    assert (rows.size, len(rows)) == (4, 8)
    assert batch["x"][[0, 1, 2, 4, 5]].tolist() == [0, 1, 2, 3, 4]
    assert batch["row_weight"].tolist() == [1, 1, 1, 0, 1, 1, 0, 0]


def test_sums_are_added_in_float64(tmp_path):
    # 2^24 + 1 has no float32: added there, the ones behind it would vanish.
    weight = np.ones(9, np.float32)
    weight[0] = 2.0**24
    counts = []
    trainer = make(tmp_path, eval={"batch_size": 1}, compute_metrics=lambda sums: counts.append(sums["loss"][1]) or {})
    trainer.evaluate(examples(9) | {"row_weight": weight})
    assert counts == [2.0**24 + 8]


@pytest.mark.parametrize("use_ema", (True, False))
def test_the_moving_average_is_what_is_evaluated_where_it_is_wanted(use_ema, tmp_path):
    held_out = examples(N, seed=1)
    trainer = make(
        tmp_path,
        held_out=held_out,
        max_steps=3,
        optimizer={"ema_decay": 0.9},
        eval={"use_ema": use_ema},
        predict_fn=lambda model, batch: model(batch["x"]),
    )
    assert trainer.evaluate() == pytest.approx(by_hand(trainer.state.params, held_out), rel=1e-6)  # no update yet
    trainer.fit()
    averaged, raw = by_hand(trainer.state.ema, held_out), by_hand(trainer.state.params, held_out)
    assert abs(averaged["eval_loss"] - raw["eval_loss"]) > 0.01
    expected = averaged if use_ema else raw
    assert trainer.history.eval[-1]["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    error = trainer.predict(held_out) - held_out["y"]
    assert (error**2).mean() == pytest.approx(expected["eval_loss"], rel=1e-5)


def test_computed_figures_stand_beside_the_others_and_private_sums_do_not(tmp_path):
    def loss_fn(model, batch, rng):
        from tests.train.fits import squared_error

        loss = squared_error(model, batch, rng)
        return type(loss)(loss.sum, loss.count, {"_rows": (batch["row_weight"].sum(), 1.0), "never": (0.0, 0.0)})

    trainer = make(tmp_path, loss_fn=loss_fn, compute_metrics=lambda sums: {"rows": sums["_rows"][0]})
    assert set(figures := trainer.evaluate(examples(N))) == {"eval_loss", "rows"}
    assert figures["rows"] == N


def test_perplexity_is_infinite_where_it_overflows():
    assert perplexity(math.log(7.0)) == pytest.approx(7.0)
    assert perplexity(1e4) == math.inf
