"""What users of other trainers found broken in their tasks; numbers are of the project's list of such reports.

Only what no other file holds: shifts, masks, packing and templates are in tests/data/test_sft.py and test_sft.py,
truncation of pairs in tests/data/test_pairs.py, TRL's numbers in test_preference_losses.py and test_dpo.py.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.config import load_config
from jtrain.data.build import build_data
from jtrain.data.pairs import PairRows
from jtrain.data.rows import IGNORE
from jtrain.data.tokenizers import ByteTokenizer, load_tokenizer
from jtrain.tasks import trainer_of
from jtrain.tasks.language_loss import next_token_loss
from tests.data.test_pairs import P, pair_rows, store_of, words
from tests.tasks.preferences import RUNS, first_line, settings, trained, word_model
from tests.train.linear import linear_batch, linear_program
from tests.train.tiny import LENGTH, put, tiny_program, tiny_rows

grid = pytest.mark.grid
PAIRS = RUNS["pairs"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    word_model(folder / "model")
    return folder


@pytest.fixture
def place(models, tmp_path):
    (tmp_path / "model").symlink_to(models / "model")
    return tmp_path


# -- one mean over the global batch (1, 2, 3, 5) -----------------------------------------------------------------------


def test_one_token_that_costs_4_and_nine_that_cost_1_have_a_mean_of_1_3():
    """A mean of the means of these two micro-batches would be 2.5."""
    weight = np.asarray([1, 0, 0, 0, 9, 0, 0, 0], np.float32)  # a row of weight 9 is nine of weight 1
    program = linear_program(2)
    state = program.init()
    batch = linear_batch(2, weight=weight)
    predicted = batch["x"] @ np.asarray(state.params["w"]) + np.asarray(state.params["b"])
    batch["y"] = (predicted - np.asarray([[2.0], [1.0]])).astype(np.float32)
    _, metrics = program.train_step(state, batch)
    assert float(metrics["loss"]) == pytest.approx(1.3, rel=1e-5)


class _Table:
    """A language model whose logits are the rows of a table."""

    def __init__(self, table_VV):
        self.table_VV = table_VV

    def hidden(self, ids, **_):
        return self.table_VV[ids]

    def head(self):
        return jnp.eye(self.table_VV.shape[1])


def test_the_gradient_of_a_batch_is_that_of_its_parts_with_label_smoothing():
    """Micro-batches of 1, 3 and 6 targets: sums of gradients over the sum of counts."""
    draw = np.random.default_rng(0)
    table = jnp.asarray(draw.normal(size=(12, 12)), jnp.float32)
    ids = draw.integers(1, 12, (3, 8)).astype(np.int32)
    labels = np.full_like(ids, IGNORE)
    for row, count in enumerate((1, 3, 6)):
        labels[row, 8 - count :] = ids[row, 8 - count :]
    loss_fn = next_token_loss(label_smoothing=0.1)

    def sums(table, labels):
        ones = jnp.ones_like(ids)
        batch = {"input_ids": ids, "labels": labels, "segment_ids": ones, "position_ids": ones, "row": ones[:, 0]}
        loss = loss_fn(_Table(table), batch, jax.random.key(0))
        return loss.sum, loss.count

    value = jax.jit(jax.value_and_grad(sums, has_aux=True))
    (whole, count), gradient = value(table, labels)
    parts = [value(table, np.where(np.arange(3)[:, None] == row, labels, IGNORE)) for row in range(3)]
    assert [float(n) for (_, n), _ in parts] == [1, 3, 6] and float(count) == 10  # the terms that there are
    assert float(sum(s for (s, _), _ in parts)) == pytest.approx(float(whole), rel=1e-6)
    np.testing.assert_allclose(sum(g for _, g in parts), gradient, atol=1e-6)
    # Here a label is what follows its token: by hand, in float64.
    logits = np.asarray(table, np.float64)[ids[:, :-1]]
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    live = labels[:, 1:] != IGNORE
    chosen = np.take_along_axis(logs, np.where(live, labels[:, 1:], 0)[..., None], -1)[..., 0]
    assert float(whole) == pytest.approx(-np.where(live, 0.9 * chosen + 0.1 * logs.mean(-1), 0).sum(), rel=1e-5)


WAYS = {
    "packed, 7 rows": {"eval": {"batch_size": 7}, "data": {"packing": "best_fit", "buckets": []}},
    "packed": {"eval": {"batch_size": 1}, "data": {"packing": "best_fit", "buckets": []}},
    "7 rows": {"eval": {"batch_size": 7}},
    "devices": {"eval": {"batch_size": 4}, "devices": 4, "mesh": "fsdp=2,tensor=2"},
    "one by one": {"eval": {"batch_size": 1}},
    "pipeline": {"eval": {"batch_size": 8}, "devices": 8, "mesh": "data=2,fsdp=2,pipeline=2"},
    "context": {"eval": {"batch_size": 4}, "devices": 4, "mesh": "data=2,context=2"},
    "concatenated, devices": {"data": {"packing": "concat", "buckets": []}, "devices": 8, "mesh": "data=4,tensor=2"},
}


@pytest.fixture(scope="module")
def held_out():
    """21 examples of many lengths, so that no batch of more than one divides them."""
    draw = np.random.default_rng(2)
    text = lambda most: " ".join(f"w{n}" for n in draw.integers(3, 96, draw.integers(1, most)))
    return [{"prompt": text(9), "completion": f" {text(12)}"} for _ in range(21)]


def evaluated(models, folder, rows, **changes):
    config = settings(folder, "sft", model={"path": str(models / "model")}, global_batch_size=8, **changes)
    trainer = trainer_of("sft")(config, train_dataset=rows, eval_dataset=rows)
    return {name: value for name, value in trainer.evaluate().items() if "efficiency" not in name}


@pytest.fixture(scope="module")
def reference(models, held_out, tmp_path_factory):
    return evaluated(models, tmp_path_factory.mktemp("four"), held_out, eval={"batch_size": 4})


DEFAULT = ("packed, 7 rows", "concatenated, devices")


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in DEFAULT else grid) for way in WAYS])
def test_the_loss_of_an_evaluation_is_one_number(way, models, held_out, reference, tmp_path):
    """Whatever the batch, the devices and the packing: every example once, every token with the same weight."""
    found = evaluated(models, tmp_path, held_out, **WAYS[way])
    assert found.keys() == reference.keys() >= {"eval_loss", "perplexity", "eval_mean_token_accuracy"}
    assert found == pytest.approx(reference, rel=1e-6)


@grid
@pytest.mark.parametrize("mesh", ["context=2,data=1", "context=4,data=1", "context=2,fsdp=2,data=1"])
def test_one_live_token_in_the_batch_has_the_gradient_of_one_device(mesh):
    """(25) A device's own number of targets, 0 on most of them, must not be a divisor anywhere."""
    rows = tiny_rows(rows=4)
    rows["segment_ids"][:], rows["labels"][:] = 1, IGNORE
    rows["position_ids"][:] = np.arange(LENGTH)
    rows["labels"][2, LENGTH - 3] = 7
    found = []
    for where in (None, mesh):
        sizes = [int(part.partition("=")[2]) for part in (where or "data=1").split(",")]
        program = tiny_program(where, devices=int(np.prod(sizes)), global_batch_size=4)
        _, metrics = program.train_step(program.init(), put(program, rows))
        found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


# -- pairs: ends, beginnings, equal prompts (30, 32, 35) ---------------------------------------------------------------


def test_the_end_of_a_completion_is_scored_where_it_is_the_padding_token_too():
    tokenizer = ByteTokenizer()
    end = tokenizer.eos_id
    store = store_of([{"prompt": "ab", "chosen": "cd", "rejected": "e"}], tokenizer=tokenizer)
    batch = PairRows(store, store.edges, 8, pad_id=end).rows(np.asarray([0]))
    for half, length in (("chosen", 5), ("rejected", 4)):
        assert (batch[f"{half}_input_ids"][0] == end).sum() == 8 - length + 1  # padding as well
        assert np.flatnonzero(batch[f"{half}_labels"][0] == end).tolist() == [length - 1]


def test_a_pair_of_conversations_has_one_begin_token_though_template_and_tokenizer_both_write_it(tmp_path):
    words(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    tokenizer = load_tokenizer(str(tmp_path))
    template = "{{ bos_token }}{% for m in messages %}{{ ' ' ~ m.content }}{% endfor %}"
    turn = lambda role, text: [{"role": role, "content": text}]
    pair = {"prompt": turn("user", "w5"), "chosen": turn("assistant", "w6"), "rejected": turn("assistant", "w7")}
    config = load_config({"task": "dpo", "max_length": 8, "data.prepend_bos": True}, (), {})
    config = config.model_copy(update={"data": config.data.model_copy(update={"chat_template": template})})
    rows, _ = build_data(config, tokenizer, train=[pair])
    batch = rows.rows(np.asarray([0]))
    assert batch["chosen_input_ids"][0][:4].tolist() == [1, 5, 6, 0]
    assert batch["rejected_input_ids"][0][:4].tolist() == [1, 5, 7, 0]


def test_no_pair_loses_a_completion_and_both_halves_have_one_prompt_at_every_length():
    """(35) Of 40 pairs, at lengths from 2 to 24 and both truncations."""
    draw = np.random.default_rng(3)
    text = lambda most: "".join(chr(n) for n in draw.integers(97, 123, draw.integers(1, most)))
    pairs = [{"prompt": text(20), "chosen": "1" + text(9), "rejected": "2" + text(9)} for _ in range(40)]
    for length in range(2, 25):
        for truncation in ("keep_start", "keep_end"):
            fits = sum(truncation == "keep_end" or len(pair["prompt"]) < length for pair in pairs)
            rows = pair_rows(pairs, length, truncation)
            assert (len(rows), rows.dropped) == (fits, 40 - fits)
            batch = rows.rows(np.arange(fits))
            scored = {half: batch[f"{half}_labels"] != IGNORE for half in ("chosen", "rejected")}
            starts = {half: mask.argmax(1) for half, mask in scored.items()}
            assert all(mask.any(1).all() for mask in scored.values())
            prompts = [
                [ids[:start].tolist() for ids, start in zip(batch[f"{half}_input_ids"], starts[half], strict=True)]
                for half in scored
            ]
            assert prompts[0] == prompts[1] and all(prompts[0])
            assert P not in np.concatenate(prompts[0])


# -- the reference (36, EasyDeL#172) -----------------------------------------------------------------------------------


@grid
@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"dropout": 0.3}},
        {"dpo": {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 3}, "data": {"buckets": [16, 32]},
         "global_batch_size": 2},
        {"dpo": {"loss_type": "sigmoid_norm"}, "data": {"buckets": [16, 24, 32]}},
    ],
    ids=["dropout", "a table of other batches and lengths", "a token"],
)  # fmt: skip
def test_step_0_costs_ln_2_also(place, changes):
    line = first_line(settings(place, "dpo", **changes), PAIRS)
    assert line["loss"] == pytest.approx(math.log(2), abs=2e-6)
    assert line["rewards/margins"] == pytest.approx(0, abs=2e-6)


@grid
def test_the_reference_stays_what_it_was(place):
    """Four updates with a large rate: against a table of the first model, a copy of it, and again the table."""
    runs = []
    for name, table in (("copy", False), ("table", True)):
        config = settings(place, "dpo", run_dir=str(place / name), max_steps=4, optimizer={"learning_rate": 1e-2})
        runs.append(trained(config | {"dpo": {"precompute_ref_log_probs": table}}, PAIRS).history.train)
    assert abs(runs[0][-1]["rewards/margins"]) > 0.1
    for copy, table in zip(*runs, strict=True):
        assert table["loss"] == pytest.approx(copy["loss"], rel=1e-5)
        assert table["rewards/margins"] == pytest.approx(copy["rewards/margins"], rel=1e-4, abs=1e-5)
