import json
from pathlib import Path

import numpy as np
import pytest

from jtrain.data.cache import CacheOptions
from jtrain.data.examples import example_options, example_store
from jtrain.data.inspect import describe
from jtrain.data.pairs import FORMS, MismatchedRows, PairRows, SingleRows, form_of
from jtrain.data.rows import EvalRows, TrainRows
from jtrain.data.tokenise import ExampleRecipe
from jtrain.data.tokenizers import ByteTokenizer, load_tokenizer
from jtrain.errors import DataError

RUNS = json.loads((Path(__file__).parents[1] / "tasks/goldens/preference_runs.json").read_text())
CHATML = """{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
P, E = 258, 256  # padding and end of ByteTokenizer


def store_of(records, *, tokenizer=None, single=False, whole=False, template=None):
    options = {
        "form": form_of(records[0]), "single": single, "whole": whole, "append_eos": True, "prepend_bos": False,
        "template": template, "special_tokens": {}, "text_field": "text",
    }  # fmt: skip
    recipe = example_options(CacheOptions(), ExampleRecipe("preference", options))
    return example_store(records, tokenizer or ByteTokenizer(), recipe, name="rows")


def pair_rows(records, length=8, truncation="keep_start", **options):
    store = store_of(records, **options)
    return PairRows(store, store.edges, length, truncation, pad_id=P)


def words(path):
    """The tokenizer of the goldens: w3 is token 3."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{n}": n for n in range(3, 96)}
    special = [
        {"id": n, "content": t, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False} for t, n in vocabulary.items() if n < 3
    ]  # fmt: skip
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<pad>"}
    (path / "tokenizer.json").write_text(
        json.dumps(
            {"version": "1.0", "added_tokens": special, "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
        )
    )
    return load_tokenizer(str(path))


def trimmed(batch, half):
    """Ids without padding."""
    live = batch[f"{half}_segment_ids"] > 0
    return [row[mask].tolist() for row, mask in zip(batch[f"{half}_input_ids"], live, strict=True)]


def test_pairs_have_the_tokens_that_trl_gives_them(tmp_path):
    rows = pair_rows(RUNS["pairs"], 32, tokenizer=words(tmp_path))
    batch = rows.rows(np.arange(4))
    padded = RUNS["dpo"][0]["ids"]["input_ids"]  # chosen halves, then rejected ones, right padded with 0
    want = [[token for token in row if token] for row in padded]
    assert trimmed(batch, "chosen") + trimmed(batch, "rejected") == want


def test_single_completions_and_their_mismatched_rows_have_the_tokens_that_trl_gives_them(tmp_path):
    store = store_of(RUNS["singles"], tokenizer=words(tmp_path), single=True)
    source = SingleRows(store, store.edges, 32)
    rows = MismatchedRows(TrainRows([source], seed=0, shuffle=False), 4)
    batch = rows.rows(np.arange(8))
    for ours, theirs in (("", "input_ids"), ("kl_", "KL_input_ids")):
        live = batch[f"{ours}segment_ids"] > 0
        got = [row[mask].tolist() for row, mask in zip(batch[f"{ours}input_ids"], live, strict=True)]
        assert got == 2 * [[token for token in row if token] for row in RUNS["kto"][0]["ids"][theirs]]
    assert batch["label"].tolist() == 2 * [row["label"] for row in RUNS["singles"]]
    # the completion alone is scored, whatever prompt it stands behind
    scored = [row[row != -100].tolist() for row in batch["kl_labels"]]
    assert scored[:4] == [
        scored_of[scored_of != -100].tolist() for scored_of in np.roll(batch["labels"][:4], 1, axis=0)
    ]


def test_with_the_row_before_in_the_data_a_row_has_the_same_other_completion_in_every_epoch(tmp_path):
    store = store_of(RUNS["singles"], tokenizer=words(tmp_path), single=True)
    source = SingleRows(store, store.edges, 32)
    stream = TrainRows([source], seed=3)
    rows, size = MismatchedRows(stream, None), len(source)
    plain = source.rows(np.arange(size))["labels"]
    completions = [row[row != -100].tolist() for row in plain]
    batch = rows.rows(np.arange(3 * size))
    places = stream.places(np.arange(3 * size))
    assert not np.array_equal(places[:size], np.arange(size))  # the stream is shuffled
    got = [row[row != -100].tolist() for row in batch["kl_labels"]]
    assert got == [completions[(place - 1) % size] for place in places]
    in_order = rows.in_order().rows(np.arange(size + 1))["kl_labels"]
    assert [row[row != -100].tolist() for row in in_order] == [completions[-1], *completions[:-1], []]


def test_a_pair_is_two_halves_with_the_same_prompt_and_labels_on_their_completions():
    batch = pair_rows([{"prompt": "ab", "chosen": "cd", "rejected": "e"}]).rows(np.asarray([0]))
    assert batch["chosen_input_ids"].tolist() == [[*b"abcd", E, P, P, P]]
    assert batch["rejected_input_ids"].tolist() == [[*b"abe", E, P, P, P, P]]
    assert batch["chosen_labels"].tolist() == [[-100, -100, *b"cd", E, -100, -100, -100]]
    assert batch["rejected_segment_ids"].tolist() == [[1] * 4 + [0] * 4]
    assert batch["chosen_position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 0, 0]]


LONG = {"prompt": "prompt", "chosen": "ch", "rejected": "rejected"}


@pytest.mark.parametrize(
    ("truncation", "length", "chosen", "rejected"),
    [
        ("keep_start", 8, [*b"promptch"], [*b"promptre"]),
        ("keep_start", 7, [*b"promptc"], [*b"promptr"]),
        ("keep_end", 12, [*b"omptch", E][:7], [*b"mptrejected", E]),
        ("keep_end", 11, [*b"ptch", E], [*b"ptrejected", E][-11:]),
        ("keep_end", 4, [*b"tch", E], [*b"trej"]),
    ],
)
def test_a_long_pair_is_cut_alike_in_both_halves_and_keeps_a_part_of_each_completion(
    truncation, length, chosen, rejected
):
    batch = pair_rows([LONG], length, truncation).rows(np.asarray([0]))
    got = trimmed(batch, "chosen")[0], trimmed(batch, "rejected")[0]
    prompts = [
        ids[: (batch[f"{half}_labels"][0] != -100).argmax()]
        for half, ids in zip(("chosen", "rejected"), got, strict=True)
    ]
    assert prompts[0] == prompts[1] != []
    if truncation == "keep_start":
        assert got == (chosen, rejected)
    else:
        assert len(got[1]) == length and [*b"promptch", E][-len(got[0]) :] == got[0]
        assert bytes(prompts[0]) == b"prompt"[-len(prompts[0]) :]
    assert all((batch[f"{half}_labels"] != -100).sum() >= 1 for half in ("chosen", "rejected"))


def test_pairs_whose_prompt_fills_the_row_are_left_out_and_counted():
    records = [LONG, {"prompt": "p", "chosen": "a", "rejected": "b"}, LONG]
    rows = pair_rows(records, 6)
    assert (len(rows), rows.dropped) == (1, 2)
    assert trimmed(rows.rows(np.asarray([0])), "chosen") == [[*b"pa", E]]
    with pytest.raises(DataError, match="every one of the 2 pairs has a prompt that fills max_length: 6"):
        pair_rows([LONG, LONG], 6)
    assert pair_rows(records, 6, "drop").dropped == 2


def test_a_prompt_that_stands_in_both_halves_is_found():
    text = {"chosen": "Q: one A: two", "rejected": "Q: one A: six"}
    batch = pair_rows([text], 32).rows(np.asarray([0]))
    assert batch["chosen_labels"][0][batch["chosen_labels"][0] != -100].tolist() == [
        *b" two",
        E,
    ]  # as TRL: with its space
    turns = [{"role": "user", "content": "q"}]
    chat = {half: [*turns, {"role": "assistant", "content": half[0]}] for half in ("chosen", "rejected")}
    batch = pair_rows([chat], 64, template=CHATML).rows(np.asarray([0]))
    assert bytes(batch["chosen_labels"][0][batch["chosen_labels"][0] != -100].tolist()) == b"c\n"


def test_halves_of_reward_data_stay_whole_with_their_margins():
    record = {"chosen": "ab", "rejected": "ac", "margin": 1.5}
    store = store_of([record], whole=True)
    batch = PairRows(store, store.edges, 8, "drop", pad_id=P, margins=True).rows(np.asarray([0]))
    assert trimmed(batch, "chosen") == [[*b"ab", E]] and batch["margin"].tolist() == [1.5]


def test_rows_past_the_end_of_an_evaluation_have_no_label():
    rows = EvalRows([pair_rows([{"prompt": "ab", "chosen": "cd", "rejected": "e"}])])
    batch = rows.rows(np.arange(2))
    assert (batch["rejected_labels"][0] != -100).any()
    for half in ("chosen", "rejected"):
        assert (batch[f"{half}_labels"][1] == -100).all() and not batch[f"{half}_segment_ids"][1].any()


def test_a_batch_is_as_long_as_its_longest_half():
    rows = pair_rows(
        [{"prompt": "ab", "chosen": "c", "rejected": "defg"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    )
    assert rows.lengths(np.arange(2)).tolist() == [7, 3]


GOOD = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, r"rows\[1\].*chosen and its rejected half are equal"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, r"rows\[1\].*chosen completion is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, r"rows\[1\].*rejected completion is empty"),
        ({"prompt": "a", "chosen": "b"}, r"rows\[1\].*its fields are prompt, chosen"),
        ({"chosen": "b", "rejected": "c"}, r"rows\[1\].*no prompt, and its chosen and rejected halves begin diff"),
        ({**GOOD, "margin": "much"}, r"rows\[1\].*margin is 'much'"),
    ],
)  # fmt: skip
def test_a_record_that_can_not_be_used_is_named(record, message):
    with pytest.raises(DataError, match=message):
        store_of([GOOD, record])


def test_a_label_is_true_or_false():
    with pytest.raises(DataError, match=r"rows\[0\].*label is 'yes'"):
        store_of([{"prompt": "a", "completion": "b", "label": "yes"}], single=True)


def test_pairs_are_taken_apart_for_losses_of_single_completions():
    store = store_of([GOOD], single=True)
    assert SingleRows(store, store.edges, 8).rows(np.arange(2))["label"].tolist() == [True, False]


def test_what_a_pair_holds_can_be_looked_at():
    store = store_of([{"prompt": "ab", "chosen": "cd", "rejected": "e"}])
    rows = TrainRows([PairRows(store, store.edges, 8, pad_id=P)], seed=0)
    found = describe(rows, None, ByteTokenizer(), rows=1)
    texts = [[span["text"] for span in segment if span["text"]] for segment in found["examples"][0]["segments"]]
    assert texts == [["ab", "cd"], ["ab", "e"]]
    assert (found["examples"][0]["targets"], found["train"]["fill"]) == (5, 9 / 16)


def test_forms_are_told_by_their_fields():
    assert form_of({"text": "a"}) is None
    assert "chosen" in FORMS
