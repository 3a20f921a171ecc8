import logging

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.train.compiled import CompiledStep
from tests.train.fits import BATCH, examples, make


def compiled(**options):
    return CompiledStep(jax.jit(lambda scale, batch: scale * batch["x"].sum()), "train_step", **options)


def batch(width=3, dtype=np.float32):
    return {"x": np.ones((2, width), dtype)}


def test_a_function_is_compiled_once_for_batches_of_one_form(caplog):
    step = compiled()
    with caplog.at_level(logging.WARNING):
        step.compile(2.0, batch())
        first = step.latest
        assert [float(step(2.0, batch())) for _ in range(3)] == [12.0] * 3
        step.compile(2.0, batch())
    assert step.latest is first and caplog.text == ""
    assert step.seconds > 0


def test_shapes_alone_are_enough_to_compile():
    step = compiled()
    step.compile(jax.ShapeDtypeStruct((), jnp.float32), {"x": jax.ShapeDtypeStruct((2, 3), jnp.float32)})
    assert float(step(jnp.float32(2), batch())) == 12.0


def test_another_form_is_compiled_with_a_warning_that_names_what_changed(caplog):
    step = compiled()
    with caplog.at_level(logging.WARNING):
        step(2.0, batch())
        assert float(step(2.0, batch(width=4))) == 16.0
        step(2.0, batch())  # the first program is still there
    assert [record.message for record in caplog.records] == [
        "train_step is compiled again: batch['x'] was ((2, 3), 'float32'), is ((2, 4), 'float32')"
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        step(2.0, batch(width=4) | {"y": np.ones(1, np.float32)})
    assert "batch['y'] was absent, is ((1,), 'float32')" in caplog.text


def test_where_several_forms_are_expected_there_is_no_warning(caplog):
    step = compiled(once=False)
    with caplog.at_level(logging.WARNING):
        for width in (3, 4):
            step(2.0, batch(width))
    assert caplog.text == ""


class Growing:
    """Rows that carry an array of another width from row 16 on."""

    def __len__(self):
        return 40

    def rows(self, indices):
        rows = {name: values[indices % 40] for name, values in examples().items()}
        width = 2 if indices.min() < 2 * BATCH else 5
        weight = np.ones(len(indices), np.float32)
        return rows | {"row_weight": weight, "extra": np.zeros((len(indices), width), np.float32)}


def test_a_run_whose_batches_change_their_form_goes_on_and_says_so(tmp_path, capsys):
    trainer = make(tmp_path, rows=Growing(), max_steps=4)
    trainer.fit()
    assert trainer.counters.step == 4
    message = "train_step is compiled again: batch['extra'] was ((1, 8, 2), 'float32'), is ((1, 8, 5), 'float32')"
    assert capsys.readouterr().out.count(message) == 1
