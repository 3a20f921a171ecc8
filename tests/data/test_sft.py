"""Examples for SFT: forms of records, masks, truncation, packing, buckets, and what is said when data is wrong."""

import itertools
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from jtrain.config import load_config
from jtrain.data.build import build_data, build_eval
from jtrain.data.conversations import ChatEncoder, form_of
from jtrain.data.inspect import describe
from jtrain.data.loader import DataLoader
from jtrain.data.packing import plan_examples, split_documents
from jtrain.data.rows import IGNORE
from jtrain.data.sft import counts
from jtrain.data.tokenizers import load_tokenizer
from jtrain.errors import ConfigError, DataError

FIXTURES = Path(__file__).parent / "fixtures" / "chat"
CHATML = str(FIXTURES / "chatml.jinja")
EOS, BOS = 256, 257  # of the byte tokenizer


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


TWO = [user("Hello"), assistant("Yes"), user("Who?"), assistant("Me")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer with the control tokens of the templates."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_bytes(lzma.decompress((FIXTURES / "tokenizer.json.xz").read_bytes()))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    return folder


@pytest.fixture(scope="module")
def bpe(folder):
    return load_tokenizer(str(folder))


def config_of(tmp_path, **changes):
    settings = {"task": "sft", "max_length": 64, "data.cache_dir": str(tmp_path / "cache"), "data.shuffle": False}
    return load_config(settings | changes, (), {})


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def rows_of(tmp_path, records, tokenizer="bytes", **changes):
    """The first row of every example, of records in memory."""
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    rows, _ = build_data(config_of(tmp_path, **changes), tokenizer, train=records)
    return rows, rows.rows(np.arange(len(rows)))


def learned(batch, row=0):
    """The tokens of a row that are targets."""
    return batch["labels"][row][batch["labels"][row] != IGNORE].tolist()


def text_of(ids):
    return bytes(token for token in ids if token < 256).decode()


# -- forms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"prompt": "a", "completion": "b", "id": 1}, "prompt and completion"),
        ({"prompt": [user("a")], "completion": [assistant("b")]}, "prompt and completion"),
        ({"messages": TWO, "text": "beside"}, "messages"),
        ({"messages": None, "prompt": None, "text": "a"}, "text"),  # a Parquet column that this record leaves empty
        ({"conversations": [{"from": "human", "value": "a"}]}, "messages"),
        ({"instruction": "a", "output": "b"}, None),
    ],
)
def test_the_form_is_found_by_the_fields(record, form):
    assert form_of(record, "text") == form


def test_a_text_has_one_begin_token_and_its_end_and_is_learned_but_for_its_first_token(tmp_path, folder, bpe):
    _, batch = rows_of(tmp_path, [{"text": "In the beginning"}], bpe, **{"data.prepend_bos": True})
    ids = batch["input_ids"][0][batch["segment_ids"][0] > 0].tolist()
    assert ids == [bpe.bos_id, *bpe.encode_batch(["In the beginning"])[0], bpe.eos_id]
    assert learned(batch) == ids[1:]
    # A text that was rendered before has its begin and end tokens already: neither comes twice.
    _, batch = rows_of(tmp_path, [{"text": "<bos>In the beginning<eos>"}], bpe, **{"data.prepend_bos": True})
    assert batch["input_ids"][0][batch["segment_ids"][0] > 0].tolist() == ids


@pytest.mark.parametrize(
    ("record", "settings", "targets"),
    [
        ({"prompt": "ab", "completion": "cd"}, {}, "cd"),
        ({"prompt": "ab", "completion": "cd"}, {"completion_only_loss": True}, "cd"),
        ({"prompt": "ab", "completion": "cd"}, {"completion_only_loss": False}, "bcd"),
        ({"text": "abc"}, {}, "bc"),
    ],
)
def test_what_is_learned_follows_the_form_and_the_section(tmp_path, folder, bpe, record, settings, targets):
    _, batch = rows_of(tmp_path, [record], **{"sft": settings})
    assert learned(batch) == [*targets.encode(), EOS]

    changes = {"data.chat_template": CHATML, "max_length": 128}
    _, every = rows_of(tmp_path, [{"messages": TWO}], bpe, **changes)
    _, only = rows_of(tmp_path, [{"messages": TWO}], bpe, **changes, **{"sft.assistant_only_loss": True})
    assert (every["input_ids"] == only["input_ids"]).all()
    assert len(learned(every)) == (every["segment_ids"] > 0).sum() - 1
    assert bpe.decode(learned(only), skip_special=False) == "Yes<|im_end|>Me<|im_end|>"
    record = {"prompt": TWO[:3], "completion": TWO[3:]}
    _, last = rows_of(tmp_path, [record], bpe, **changes)
    assert bpe.decode(learned(last), skip_special=False).startswith("Me<|im_end|>")
    assert (last["input_ids"] == every["input_ids"]).all()


def test_the_end_is_learned_also_where_it_is_the_token_of_the_padding(tmp_path):
    tokenizer = load_tokenizer("bytes")
    tokenizer.pad_id = tokenizer.eos_id
    _, batch = rows_of(tmp_path, [{"prompt": "a", "completion": "bc"}, {"prompt": "ab", "completion": "c"}], tokenizer)
    ends = batch["input_ids"] == EOS
    live = batch["labels"] == EOS
    assert (ends.sum(1) > 1).all()  # padding as well
    assert (live.sum(1) == 1).all() and (live <= (batch["segment_ids"] > 0)).all()


def test_a_completion_begins_where_the_tokens_part(bpe):
    encoder = ChatEncoder(bpe)
    both = encoder.completed("In the beginni", "ng")
    prompt, whole = bpe.encode("In the beginni"), bpe.encode("In the beginning")
    shared = next(place for place in range(len(prompt)) if prompt[: place + 1] != whole[: place + 1])
    assert both.start == shared < len(prompt)
    assert both.ids == [*whole, bpe.eos_id]


def test_messages_of_other_data_sets_are_understood(tmp_path, bpe):
    changes = {"data.chat_template": CHATML, "max_length": 128}
    shared = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Yes"}]
    plain, other = (
        rows_of(tmp_path, [record], bpe, **changes)[1] for record in ({"messages": TWO[:2]}, {"conversations": shared})
    )
    assert (plain["input_ids"] == other["input_ids"]).all()


def test_an_answer_without_content_is_an_error_of_its_line_unless_it_calls_a_tool(tmp_path, bpe):
    changes = {"data.chat_template": str(FIXTURES / "qwen3.jinja"), "max_length": 512}
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    _, batch = rows_of(tmp_path, [{"messages": [user("Rain?"), assistant(None, tool_calls=[call])]}], bpe, **changes)
    assert "weather" in bpe.decode(batch["input_ids"][0].tolist())
    silent = ({"role": "assistant"}, assistant(None), assistant(None, tool_calls=[]), {"from": "gpt", "value": None})
    for place, answer in enumerate(silent):
        path = write(tmp_path / f"{place}.jsonl", [{"messages": TWO}, {"messages": [user("Hello"), answer]}])
        with pytest.raises(DataError, match=rf"{place}\.jsonl: line 2.* message 1 .*content is null"):
            build_data(config_of(tmp_path, **changes, **{"data.train": path}), bpe, progress=False)


def test_tools_may_be_a_list_or_its_json_and_reach_the_template(tmp_path, bpe):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    changes = {"data.chat_template": str(FIXTURES / "qwen3.jinja"), "max_length": 512}
    given = [{"messages": TWO, "tools": form} for form in (tools, json.dumps(tools), None)]
    with_list, with_text, without = (rows_of(tmp_path, [record], bpe, **changes)[1]["input_ids"] for record in given)
    assert (with_list == with_text).all()
    assert "weather" in bpe.decode(with_list[0].tolist()) and "weather" not in bpe.decode(without[0].tolist())


# -- files and caches -------------------------------------------------------------------------------------------------


def test_files_of_every_kind_give_the_rows_of_records_in_memory(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [{"prompt": f"prompt {n} ", "completion": "x" * n} for n in range(1, 30)]
    tokenizer = load_tokenizer("bytes")
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet", row_group_size=7)
    wanted = rows_of(tmp_path, records)[1]
    for path in (write(tmp_path / "a.jsonl", records), str(tmp_path / "a.parquet")):
        rows, _ = build_data(config_of(tmp_path, **{"data.train": path}), tokenizer, progress=False)
        found = rows.rows(np.arange(len(rows)))
        assert all((found[name] == wanted[name]).all() for name in wanted)


def test_conversations_from_parquet_are_those_of_json(tmp_path, bpe):
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [{"messages": TWO}, {"messages": [{"role": "system", "content": "Hm"}, *TWO[:2]]}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    changes = {"data.chat_template": CHATML, "max_length": 128, "sft.assistant_only_loss": True}
    rows, _ = build_data(config_of(tmp_path, **changes, **{"data.train": str(tmp_path / "a.parquet")}), bpe)
    wanted = rows_of(tmp_path, records, bpe, **changes)[1]
    found = rows.rows(np.arange(len(rows)))
    assert (found["input_ids"] == wanted["input_ids"]).all() and (found["labels"] == wanted["labels"]).all()


def test_several_processes_make_the_same_cache_as_one(tmp_path, folder, bpe, monkeypatch):
    path = write(tmp_path / "chat.jsonl", [{"messages": TWO[: 2 + 2 * (n % 2)]} for n in range(60)])
    changes = {"data.chat_template": CHATML, "data.train": path, "max_length": 128, "sft.assistant_only_loss": True}
    one, _ = build_data(config_of(tmp_path, **changes), bpe)
    monkeypatch.setattr("jtrain.data.examples.CHUNK_BYTES", 1500)
    monkeypatch.setattr("jtrain.data.examples.PARALLEL_BYTES", 1)
    two, _ = build_data(config_of(tmp_path / "b", **changes, **{"data.num_workers": 2}), bpe)
    assert one.fingerprint == two.fingerprint
    for n in range(len(one)):
        assert all((one[n][name] == two[n][name]).all() for name in one[n])


def test_the_chat_template_is_part_of_the_cache(tmp_path, bpe):
    path = write(tmp_path / "chat.jsonl", [{"messages": TWO}])
    changes = {"data.train": path, "max_length": 128}
    other = tmp_path / "other.jinja"
    other.write_text(Path(CHATML).read_text().replace("<|im_end|>", "<|eot_id|>"))
    prints = set()
    for template in (CHATML, str(other)):
        rows, _ = build_data(config_of(tmp_path, **changes, **{"data.chat_template": template}), bpe)
        prints.add((rows.fingerprint, rows[0]["input_ids"].tobytes()))
    assert len(prints) == 2
    rows, _ = build_data(
        config_of(tmp_path, **changes, **{"data.chat_template": CHATML, "sft.assistant_only_loss": True}), bpe
    )
    assert rows.fingerprint not in {fingerprint for fingerprint, _ in prints}


def test_sources_of_several_forms_are_one_mixture(tmp_path, bpe):
    chat = write(tmp_path / "chat.jsonl", [{"messages": TWO}])
    texts = write(tmp_path / "texts.jsonl", [{"text": "And it came to pass"}])
    changes = {"data.train": [chat, texts], "data.chat_template": CHATML, "max_length": 128}
    rows, _ = build_data(config_of(tmp_path, **changes), bpe)
    assert [source.title for source in rows.sources] == [
        "messages; all tokens are learned",
        "texts; all tokens are learned",
    ]
    assert len(rows) == 2


def test_a_fraction_holds_out_whole_examples_from_the_end(tmp_path):
    records = [{"prompt": "p", "completion": "x" * 40 if n == 9 else "yes"} for n in range(10)]
    config = config_of(tmp_path, **{"data.eval": 0.2})
    rows, held_out = build_data(config, load_tokenizer("bytes"), train=records)
    assert (len(rows), len(held_out)) == (8, 2)
    assert (held_out.rows(np.arange(2))["labels"] != IGNORE).sum(1).tolist() == [4, 41]
    first, last = split_documents(np.arange(0, 22, 2), 0.3, unit=2)
    assert (len(first) - 1, len(last) - 1) == (6, 4)  # 3 of 5 pairs, and 2


# -- truncation, packing and padding ----------------------------------------------------------------------------------

LONG = [{"prompt": "p" * 6, "completion": "c" * 9}, {"prompt": "q" * 30, "completion": "d" * 3}]


@pytest.mark.parametrize(
    ("packing", "truncation", "targets"),
    [
        ("none", "keep_start", ["c" * 9 + "|"]),  # of the second example only the prompt is left: it is dropped
        ("none", "keep_end", ["c" * 9 + "|", "d" * 3 + "|"]),
        ("best_fit", "keep_end", ["c" * 9 + "|", "d" * 3 + "|"]),
        ("best_fit_split", "keep_start", ["c" * 9 + "|", "dd|"]),  # a piece begins with the last d
        ("concat", "keep_start", ["c" * 9 + "|", "dd|"]),
    ],
)
def test_what_stays_of_long_examples(tmp_path, packing, truncation, targets):
    changes = {"max_length": 16, "data.packing": packing, "data.truncation": truncation}
    rows, batch = rows_of(tmp_path, LONG, **changes)
    found = ["".join("|" if token == EOS else chr(token) for token in learned(batch, row)) for row in range(len(rows))]
    assert "".join(sorted("".join(found))) == "".join(sorted("".join(targets)))
    assert counts(rows.sources[0])["left_out"] == (packing == "none" and truncation == "keep_start")
    assert counts(rows.sources[0])["cut"] == 1


def test_plans_of_examples_are_what_a_loop_makes():
    generator = np.random.default_rng(0)
    edges = np.concatenate([[0], np.cumsum(generator.integers(1, 40, 200))])
    targets = (generator.random(edges[-1]) < 0.1).astype(np.uint8)
    for packing, truncation in (("none", "keep_start"), ("none", "keep_end"), ("best_fit", "keep_start")):
        plan = plan_examples(edges, targets, 16, packing, truncation)
        wanted = []
        for begin, end in itertools.pairwise(edges):
            begin, end = (begin, min(end, begin + 16)) if truncation == "keep_start" else (max(begin, end - 16), end)
            if targets[begin + 1 : end].any():
                wanted.append((begin, end - begin))
        assert sorted(zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True)) == wanted
        assert (np.add.reduceat(plan.lengths, plan.first[:-1]) <= 16).all()


def test_packed_examples_never_predict_the_first_token_of_the_next(tmp_path):
    records = [{"text": "abcd"}, {"text": "efg"}, {"prompt": "h", "completion": "i"}]
    _, batch = rows_of(tmp_path, records[:2], max_length=16, **{"data.packing": "best_fit"})
    assert batch["segment_ids"][0].tolist() == [1] * 5 + [2] * 4 + [0] * 7
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3] + [0] * 7
    assert text_of(learned(batch)) == "bcdfg"


def test_a_batch_is_cut_to_the_first_bucket_that_holds_it(tmp_path):
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from jtrain.parallel.mesh import make_mesh

    records = [{"text": "x" * size} for size in (3, 5, 20, 6, 7, 40)]
    changes = {"data.buckets": [32, 8], "max_length": 64}
    rows, batch = rows_of(tmp_path, records, **changes)
    assert rows.buckets == (8, 32, 64)
    mesh = make_mesh("data=1", devices=jax.devices()[:1])
    sharding = NamedSharding(mesh, PartitionSpec(None, "data"))
    with DataLoader(rows, global_batch_size=2, sharding=sharding) as loader:
        found = [loader[step] for step in (0, 1, 2)]
    assert [one["input_ids"].shape for one in found] == [(1, 2, 8), (1, 2, 32), (1, 2, 64)]
    for step, one in enumerate(found):
        length = one["labels"].shape[-1]
        assert (np.asarray(one["labels"])[0] == batch["labels"][2 * step : 2 * step + 2, :length]).all()
        assert (batch["segment_ids"][2 * step : 2 * step + 2, length:] == 0).all()
    evaluation = build_eval(config_of(tmp_path, **changes), load_tokenizer("bytes"), records)
    assert evaluation.batch_length(np.asarray([0, 1])) == 8
    assert evaluation.batch_length(np.asarray([5, 6, 7])) == 64  # two past the end
    assert rows_of(tmp_path, records, max_length=600)[0].buckets == (128, 256, 512, 600)
    assert rows_of(tmp_path, records, **{"data.packing": "concat"})[0].buckets == ()


# -- when it is wrong -------------------------------------------------------------------------------------------------


def refused(tmp_path, records, tokenizer="bytes", error=DataError, **changes):
    with pytest.raises(error) as caught:
        rows_of(tmp_path, records, tokenizer, **changes)
    return str(caught.value)


def test_fields_that_fit_no_form_are_shown_with_the_forms_that_are_known(tmp_path):
    text = refused(tmp_path, [{"instruction": "a", "output": "b"}])
    assert all(word in text for word in ("instruction, output", "prompt and completion", "messages", "data.text_field"))


def test_a_bad_record_is_named_by_its_line(tmp_path):
    records = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}]
    path = write(tmp_path / "a.jsonl", records)
    with pytest.raises(DataError, match=r"a\.jsonl: line 2 can't be used: its completion is empty"):
        build_data(config_of(tmp_path, **{"data.train": path}), load_tokenizer("bytes"), progress=False)
    assert "train_dataset[1] can't be used: its completion is empty" in refused(tmp_path, records)
    rows, _ = rows_of(tmp_path, records, **{"data.on_bad_record": "skip"})
    assert len(rows) == 1


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"text": "a"}, "train_dataset[1] can't be used: its fields are text, and the records before it hold messages"),
        ({"messages": [assistant("a"), assistant("b")]}, "train_dataset[1] can't be used: the chat template"),
        ({"messages": [user("a"), user("b")]}, "Conversation roles must alternate"),
        ({"messages": "hello"}, "train_dataset[1] can't be used: a conversation is a list of messages"),
        ({"messages": TWO, "tools": "{"}, "its tools are no JSON"),
        ({"messages": TWO, "chat_template_kwargs": [1]}, "its chat_template_kwargs are a list"),
    ],
)
def test_a_conversation_that_can_not_be_read_is_named(tmp_path, bpe, second, words):
    changes = {"data.chat_template": str(FIXTURES / "mistral.jinja")}
    assert words in refused(tmp_path, [{"messages": TWO}, second], bpe, **changes)


def test_a_template_without_the_assistants_tokens_is_an_error_where_only_they_are_learned(tmp_path, bpe):
    silent = tmp_path / "silent.jinja"
    silent.write_text("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    changes = {"data.chat_template": str(silent), "sft.assistant_only_loss": True}
    text = refused(tmp_path, [{"messages": TWO}], bpe, **changes)
    assert "train_dataset[0] can't be used" in text and "generation" in text
    rows_of(tmp_path, [{"messages": TWO}], bpe, **{"data.chat_template": str(silent)})


def test_data_with_nothing_to_learn_is_an_error(tmp_path, bpe):
    changes = {"data.chat_template": CHATML, "sft.assistant_only_loss": True}
    text = refused(tmp_path, [{"messages": [user("a")]}, {"messages": [user("b")]}], bpe, **changes)
    assert "none of the 2 examples has a token to learn" in text
    assert "none of the 1 examples" in refused(tmp_path, [{"prompt": "p" * 99, "completion": "c"}])
    rows, _ = rows_of(tmp_path, [{"messages": [user("a")]}, {"messages": TWO}], bpe, **changes)
    assert counts(rows.sources[0]) == {"examples": 2, "left_out": 1, "cut": 0}


@pytest.mark.parametrize(
    ("record", "changes", "words"),
    [
        ({"text": "a"}, {"sft.completion_only_loss": True}, "sft.completion_only_loss: true, and the records of"),
        ({"messages": TWO}, {"sft.completion_only_loss": True}, "sft.assistant_only_loss: true learns"),
        ({"text": "a"}, {"sft.assistant_only_loss": True}, "hold text: no message of an assistant"),
        ({"prompt": "a", "completion": "b"}, {"sft.assistant_only_loss": True}, "as texts: no message"),
    ],
)
def test_an_option_for_another_form_is_refused(tmp_path, record, changes, words):
    assert words in refused(tmp_path, [record], error=ConfigError, **changes)


def test_messages_need_a_chat_template(tmp_path):
    assert "has no chat template" in refused(tmp_path, [{"messages": TWO}])
    assert "neither.jinja" in refused(tmp_path, [{"messages": TWO}], **{"data.chat_template": "/neither.jinja"})


def test_inspect_shows_the_mask_and_the_control_tokens(tmp_path, bpe):
    changes = {"data.chat_template": CHATML, "max_length": 128, "sft.assistant_only_loss": True}
    rows, _ = rows_of(tmp_path, [{"messages": TWO}], bpe, **changes)
    found = describe(rows, None, bpe, 1)
    spans = found["examples"][0]["segments"][0]
    assert [span["text"] for span in spans if span["target"]] == ["Yes<|im_end|>", "Me<|im_end|>"]
    assert "<|im_start|>user" in spans[0]["text"]
    (source,) = found["train"]["sources"]
    assert (source["form"], source["examples"]) == ("messages; the assistant's turns are learned", 1)
