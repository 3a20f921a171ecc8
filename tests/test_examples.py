"""The examples of docs/ run, do what their pages say, and stand in them word for word."""

import importlib
from pathlib import Path

import numpy as np
import optax
import pytest

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = DOCS / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.mark.parametrize(("page", "file"), (("custom_model.md", "digits.py"), ("loop.md", "loop.py")))
def test_a_page_quotes_its_example_as_a_whole(page, file):
    assert f"```python\n{(EXAMPLES / file).read_text()}```" in (DOCS / page).read_text()


def test_the_loop_fits_on_one_screen():
    assert len((EXAMPLES / "loop.py").read_text().splitlines()) <= 60


def test_the_digits_come_with_their_licence():
    assert "CC BY 4.0" in (EXAMPLES / "LICENSE.digits").read_text()


def test_the_classifier_reads_nine_of_ten_digits_that_it_has_not_seen(example, tmp_path):
    digits = example("digits")
    trainer = digits.trainer(run_dir=str(tmp_path), max_steps=60, logging={"trackers": []})
    history = trainer.fit()
    _, held_out = digits.digits()
    accuracy = history.eval[-1]["eval_accuracy"]
    assert accuracy >= 0.9
    assert (trainer.predict(held_out) == held_out["label"]).mean() == pytest.approx(accuracy, abs=1e-6)
    # The axes that the model names divide its parameters over the mesh.
    assert trainer.state.params["up"].sharding.shard_shape((64, 128)) == (32, 64)


def test_the_loop_by_hand_equals_the_trainer_bit_for_bit_and_resumes(example, tmp_path):
    loop, digits = example("loop"), example("digits")
    first = loop.train(run_dir=str(tmp_path / "loop"), max_steps=50)
    second = loop.train(run_dir=str(tmp_path / "loop"), max_steps=60)
    assert (len(first), len(second)) == (50, 10)
    trainer = digits.trainer(
        run_dir=str(tmp_path / "trainer"),
        max_steps=60,
        optimizer=optax.adamw(1e-2),
        logging={"log_every_n_steps": 1, "trackers": []},
        checkpoint={"save_steps": 0, "best": None},
        eval={"eval_steps": 0},
    )
    assert [line["loss"] for line in trainer.fit().train] == first + second
    assert np.isfinite(first + second).all()
