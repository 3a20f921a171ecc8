import numpy as np
import pytest

from tests.train.fits import examples, make


@pytest.mark.parametrize("devices", (1, 8))
def test_predictions_come_in_order_with_a_ragged_last_batch(devices, tmp_path):
    def predict_fn(model, batch):
        return {"y": model(batch["x"]), "echo": batch["x"]}

    data = examples(21, seed=1)
    trainer = make(tmp_path, devices=devices, predict_fn=predict_fn)
    found = trainer.predict(data)
    np.testing.assert_array_equal(found["echo"], data["x"])
    params = trainer.state.params
    np.testing.assert_allclose(found["y"], data["x"] @ np.asarray(params["w"]) + params["b"], rtol=1e-5, atol=1e-6)
    assert isinstance(found["y"], np.ndarray)


def test_a_list_of_dicts_is_data_too(tmp_path):
    trainer = make(tmp_path, predict_fn=lambda model, batch: batch["y"] + 1)
    rows = [{"x": np.zeros(3, np.float32), "y": np.float32(i)} for i in range(5)]
    assert trainer.predict(rows).tolist() == [1, 2, 3, 4, 5]
