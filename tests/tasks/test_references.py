"""What a reference costs and where it comes from: adapters without a copy, tables of KTO, one that moves (TR-DPO)."""

import gc
import shutil

import jax
import numpy as np
import pytest

from jtrain import Callback
from jtrain.errors import CheckpointError, ConfigError
from jtrain.parallel import processes
from jtrain.tasks.dpo import DPOTrainer
from jtrain.tasks.reference import read_table, write_table
from tests.parity.runs import bits

from .preferences import RUNS, first_line, settings, trained, word_model

PAIRS = RUNS["pairs"]
MOVING = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.25}
grid = pytest.mark.grid


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    word_model(folder / "model")
    word_model(folder / "other", "llama31-ropescaled")
    return folder


@pytest.fixture
def place(models, tmp_path):
    for name in ("model", "other"):
        (tmp_path / name).symlink_to(models / name)
    return tmp_path


def host(tree):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def alive():
    """Bytes of all arrays on the devices."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


def test_the_reference_under_adapters_is_no_second_copy_of_the_base(place):
    grown = {}
    for name, lora in (("adapters", {"rank": 2}), ("copy", {"rank": 0})):
        config = settings(place, "dpo", model={"lora": lora}, run_dir=str(place / name))
        trainer = DPOTrainer(config, train_dataset=PAIRS)
        with trainer.train_loader() as loader:
            batch, state = loader[0], trainer.state
            before = alive()
            prepared = trainer.prepare(batch, state.params, state.variables)
            jax.block_until_ready(prepared)
            grown[name] = alive() - before
        assert {"ref_chosen_logps", "ref_rejected_logps"} <= set(prepared)
    base = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    assert grown["adapters"] < base / 50 < 0.9 * base < grown["copy"]


class _Watch(Callback):
    """Keeps the policy and the reference after every step; breaks off where it is asked to."""

    def __init__(self, broken_at=None):
        self.policies, self.references, self.broken_at = {}, {}, broken_at

    def on_fit_start(self, trainer):
        self.references[trainer.counters.step] = host(trainer._reference.params)

    def on_step_end(self, trainer, step, values):
        if step == self.broken_at:
            raise RuntimeError("the power is gone")
        if trainer.waits_for(step):
            self.policies[step] = host(trainer.state.params)
            self.references[step] = host(trainer._reference.params)


def test_a_reference_that_moves_takes_its_share_of_the_policy(place):
    watch = _Watch()
    trainer = trained(settings(place, "dpo", max_steps=4, dpo=MOVING), PAIRS, callbacks=[watch])
    assert sorted(watch.references) == [0, 2, 4]
    for step in (2, 4):
        seen = zip(watch.references[step], watch.references[step - 2], watch.policies[step], strict=True)
        for now, before, policy in seen:
            np.testing.assert_allclose(now, 0.25 * policy + 0.75 * before, rtol=1e-5, atol=1e-7)
    assert any(not np.array_equal(a, b) for a, b in zip(watch.references[0], watch.references[2], strict=True))
    # What the third step is compared with is no more where the policy began.
    lines = trainer.history.train
    assert lines[0]["rewards/chosen"] == pytest.approx(0, abs=1e-6)
    assert "takes 0.25 of the policy every 2 steps" in " ".join(trainer.summary())


@grid
@pytest.mark.parametrize("roles", [{}, {"reference": "devices=2,fsdp=2"}], ids=["one mesh", "devices of its own"])
def test_a_run_with_a_moving_reference_that_is_killed_between_two_saves_ends_with_the_same_bits(place, roles):
    config = settings(
        place, "dpo", max_steps=7, dpo=MOVING, checkpoint={"save_steps": 3}, roles=roles, devices=4 if roles else 1
    )
    whole = trained(config, PAIRS)
    killed = config | {"run_dir": str(place / "killed")}
    with pytest.raises(RuntimeError, match="the power is gone"):
        trained(killed, PAIRS, callbacks=[_Watch(broken_at=5)])  # saved after 3; the reference moved after 2 and 4
    watch = _Watch()
    resumed = trained(killed, PAIRS, callbacks=[watch])
    assert min(watch.references) == 3
    losses = {line["step"]: line["loss"] for line in whole.history.train}
    assert [line["step"] for line in resumed.history.train] == [4, 5, 6, 7]
    assert all(line["loss"] == losses[line["step"]] for line in resumed.history.train)
    for part in (lambda t: t.state, lambda t: t._reference.params):
        assert bits(part(resumed)) == bits(part(whole))


@grid
def test_a_run_can_not_begin_to_move_its_reference(place):
    trained(settings(place, "dpo", checkpoint={"save_steps": 1}), PAIRS)
    with pytest.raises(ConfigError, match="sync_ref_model: False -> True"):
        trained(settings(place, "dpo", max_steps=2, dpo=MOVING), PAIRS)


@grid
def test_kto_with_a_table_has_the_numbers_of_kto_without_and_needs_the_reference_no_more(place):
    section = {"loss_type": "kto", "ref_model": str(place / "other")}
    singles, golden = RUNS["singles"], RUNS["kto"][0]
    config = settings(place, "dpo", dpo=section | {"precompute_ref_log_probs": True}, max_steps=3)
    # In one batch, in the order of the data, the row before is the same one either way: TRL's numbers are ours.
    line = first_line(config, singles)
    assert line["loss"] == pytest.approx(golden["loss"], rel=1e-5)
    assert line["kl"] == pytest.approx(golden["metrics"]["kl"], rel=1e-5, abs=1e-5)
    data = config["data"] | {"shuffle": True}
    shuffled = config | {"run_dir": str(place / "b"), "data": data, "global_batch_size": 2}
    trainer = trained(shuffled, singles, eval_dataset=singles)
    assert trainer._reference is None and set(trainer.train_rows.table) == {"ref_logps", "ref_kl_logps"}
    (place / "other").unlink()
    shutil.rmtree(place / "cache/reference")
    shutil.rmtree(place / "b/checkpoints/3")
    with pytest.raises(ConfigError, match="other"):  # a new run would need it
        trained(shuffled | {"run_dir": str(place / "c")}, singles)


@grid
def test_an_evaluation_against_a_reference_that_moves_uses_it_as_it_is_then(place):
    trainer = trained(settings(place, "dpo", max_steps=2, dpo=MOVING | {"ref_model_mixup_alpha": 1.0}), PAIRS)
    figures = trainer.evaluate(list(PAIRS))  # the reference has just become the policy
    assert figures["eval_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert figures["eval_rewards/margins"] == pytest.approx(0, abs=1e-5)


TABLE = {"ref_chosen_logps": np.arange(5, dtype=np.float32), "ref_rejected_logps": np.ones(5, np.float32)}
COLUMNS = tuple(TABLE)


def test_a_table_that_is_damaged_or_of_something_else_is_none(tmp_path):
    path = tmp_path / "folder/table.npz"
    assert read_table(path, COLUMNS, 5, "this") is None
    write_table(path, TABLE, "this")
    assert [file.name for file in path.parent.iterdir()] == ["table.npz"]
    found = read_table(path, COLUMNS, 5, "this")
    assert set(found) == set(TABLE) and all((found[name] == TABLE[name]).all() for name in TABLE)
    for names, rows, identity in ((COLUMNS, 5, "that"), (COLUMNS, 4, "this"), (("ref_logps",), 5, "this")):
        assert read_table(path, names, rows, identity) is None
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        assert read_table(path, COLUMNS, 5, "this") is None, size
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x11]) + whole[place + 1 :])
        found = read_table(path, COLUMNS, 5, "this")  # a date in the archive's list may be wrong
        assert found is None or all((found[name] == TABLE[name]).all() for name in TABLE), place


@pytest.mark.parametrize("there", [True, False])
def test_a_process_takes_the_table_of_process_0_whatever_lies_in_its_own_folder(tmp_path, monkeypatch, there):
    write_table(tmp_path / "own.npz", {name: values + 7 for name, values in TABLE.items()}, "this")
    told = iter([there, *TABLE.values()])
    monkeypatch.setattr(processes, "is_main", lambda: False)
    monkeypatch.setattr(processes, "agree", lambda value: next(told))
    found = read_table(tmp_path / "own.npz", COLUMNS, 5, "this")
    assert (found is not None) is there
    assert not there or all((found[name] == TABLE[name]).all() for name in TABLE)
    assert not list(told) or not there  # as often as the others


@grid
@pytest.mark.parametrize("section", [{}, {"ref_model": "other"}], ids=["as it began", "another model"])
def test_a_resume_takes_a_table_of_its_own_rows_alone(place, section):
    section = {name: str(place / value) for name, value in section.items()}
    config = settings(place, "dpo", max_steps=1, dpo=section | {"precompute_ref_log_probs": True})
    trained(config, PAIRS, eval_dataset=PAIRS[:2])
    longer = config | {"max_steps": 2}
    for change, message in (
        ({"ld_alpha": 0.3}, r"dpo\.ld_alpha: None -> 0\.3"),
        ({"precompute_ref_log_probs": False}, r"dpo\.precompute_ref_log_probs: True -> False"),
        ({"ref_model": str(place / "model")}, r"dpo\.ref_model: .* -> "),
    ):
        with pytest.raises(ConfigError, match=message):
            trained(longer | {"dpo": config["dpo"] | change}, PAIRS, eval_dataset=PAIRS[:2])
    shutil.rmtree(place / "cache/reference")
    if not section:
        with pytest.raises(CheckpointError, match=r"reference-eval\.npz is missing, damaged, or of other rows"):
            trained(longer, PAIRS, eval_dataset=PAIRS[2:])
        file = place / "run/reference-train.npz"
        file.write_bytes(file.read_bytes()[:-30])
        with pytest.raises(CheckpointError, match=r"reference-train\.npz is missing, damaged"):
            trained(longer, PAIRS, eval_dataset=PAIRS[:2])
        return
    resumed = trained(longer, PAIRS, eval_dataset=PAIRS[2:])  # as many rows, and others
    for name, values in resumed.eval_rows.table.items():
        np.testing.assert_allclose(values, resumed.train_rows.table[name][2:], rtol=1e-6)


@grid
def test_a_cache_that_can_not_be_written_is_none(place):
    (place / "cache").mkdir()
    (place / "cache/reference").write_text("a file where the folder is to be")
    trainer = trained(settings(place, "dpo", dpo={"precompute_ref_log_probs": True}), PAIRS)
    assert trainer.train_rows.table and (place / "run/reference-train.npz").exists()
