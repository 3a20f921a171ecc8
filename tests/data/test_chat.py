"""Chat templates against transformers: text, ids and masks of tests/peers/make_chat_goldens.py."""

import json
import lzma
import re
from pathlib import Path

import pytest

from jtrain.data.chat import ChatTemplate, load_chat_template
from jtrain.data.chat_renderer import Limits
from jtrain.data.tokenizers import load_tokenizer
from jtrain.errors import DataError

FIXTURES = Path(__file__).parent / "fixtures" / "chat"
GOLDENS = json.loads(lzma.decompress((FIXTURES / "goldens.json.xz").read_bytes()))
MARKED = {path.stem: path.read_text() for path in FIXTURES.glob("*.jinja")}
TWO = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "Me"},
]
PLAIN = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def name_of(case):
    return f"{case['tokenizer']}-{case['template']}-{case['conversation']}".replace(" ", "_")


def unmarked(source):
    return re.sub(r"\{% (end)?generation %\}", "", source)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    bpe, spm = tmp_path_factory.mktemp("bpe"), tmp_path_factory.mktemp("spm")
    (bpe / "tokenizer.json").write_bytes(lzma.decompress((FIXTURES / "tokenizer.json.xz").read_bytes()))
    (bpe / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    (spm / "tokenizer.model").write_bytes(lzma.decompress((FIXTURES / "mistral-v1-spm.model.xz").read_bytes()))
    return {"bpe": load_tokenizer(str(bpe)), "spm": load_tokenizer(str(spm))}


def encode(case, tokenizers, source, **options):
    tokenizer = tokenizers[case["tokenizer"]]
    template = ChatTemplate(source, tokenizer.special_tokens)
    return template.encode(tokenizer, case["messages"], **case["arguments"], **options)


@pytest.mark.parametrize("case", GOLDENS, ids=name_of)
def test_text_and_ids_are_those_of_transformers(case, tokenizers):
    tokenizer = tokenizers[case["tokenizer"]]
    template = ChatTemplate(MARKED[case["template"]], tokenizer.special_tokens)
    assert template.render(case["messages"], **case["arguments"]) == case["text"]
    found = encode(case, tokenizers, MARKED[case["template"]], allow_control_tokens=True)
    assert found.ids == case["ids"]
    if case["sanitized_ids"]:
        assert encode(case, tokenizers, MARKED[case["template"]]).ids == case["sanitized_ids"]


@pytest.mark.parametrize("case", GOLDENS, ids=name_of)
def test_marked_answers_are_those_of_transformers(case, tokenizers):
    found = encode(case, tokenizers, MARKED[case["template"]], allow_control_tokens=True)
    assert found.assistant_mask == case["mask"]


@pytest.mark.parametrize("case", GOLDENS, ids=name_of)
def test_answers_that_are_not_marked_are_found_by_rendering_up_to_them(case, tokenizers):
    """The oracle is the mask of the same template with marks."""
    source = unmarked(MARKED[case["template"]])
    if case["template"] == "qwen3" and case["conversation"] in ("two turns", "prompt", "tools"):
        with pytest.raises(DataError, match=r"changes message 2 \(assistant\)"):  # takes its thoughts out later
            encode(case, tokenizers, source)
        return
    assert encode(case, tokenizers, source, allow_control_tokens=True).assistant_mask == case["mask"]


@pytest.mark.parametrize("case", [c for c in GOLDENS if c["conversation"] == "control names"], ids=name_of)
def test_the_names_of_control_tokens_in_messages_are_text(case, tokenizers):
    tokenizer = tokenizers[case["tokenizer"]]
    inside = "".join(message["content"] for message in case["messages"])
    found = encode(case, tokenizers, MARKED[case["template"]])
    read = encode(case, tokenizers, MARKED[case["template"]], allow_control_tokens=True)
    count = sum(token in tokenizer.special_ids() for token in found.ids)
    assert count < sum(token in tokenizer.special_ids() for token in read.ids)
    harmless = [{**message, "content": "x"} for message in case["messages"]]
    template = ChatTemplate(MARKED[case["template"]], tokenizer.special_tokens)
    clean = template.encode(tokenizer, harmless, **case["arguments"]).ids
    assert count == sum(token in tokenizer.special_ids() for token in clean)
    assert inside.split()[0] in tokenizer.decode(found.ids, skip_special=False)
    assert "".join(tokenizer.decode(found.ids, skip_special=False).split()) == "".join(case["text"].split())


def test_the_mask_holds_the_answers_and_the_ends_of_their_turns(tokenizers):
    tokenizer = tokenizers["bpe"]
    end, line = tokenizer.token_to_id("<|im_end|>"), tokenizer.encode("\n")
    for source in (MARKED["chatml"], unmarked(MARKED["chatml"])):
        ids, mask = ChatTemplate(source, tokenizer.special_tokens).encode(tokenizer, TWO)
        assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m], skip_special=False) == (
            "Yes<|im_end|>Me<|im_end|>"
        )
        assert ids.count(end) == 5 and ids[-1:] == line and mask[-1] == 0


def test_the_end_of_a_turn_behind_a_marked_span_is_in_the_mask(tokenizers):
    tokenizer = tokenizers["bpe"]
    source = MARKED["chatml"].replace(
        "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    assert source != MARKED["chatml"]
    whole = ChatTemplate(MARKED["chatml"], tokenizer.special_tokens).encode(tokenizer, TWO)
    assert ChatTemplate(source, tokenizer.special_tokens).encode(tokenizer, TWO) == whole


def test_there_is_one_begin_token_whether_template_or_tokenizer_writes_it(tokenizers):
    for tokenizer in tokenizers.values():
        bos = tokenizer.bos_id
        with_bos = ChatTemplate("{{ bos_token }}" + PLAIN, tokenizer.special_tokens)
        ids = with_bos.encode(tokenizer, TWO).ids
        assert ids[0] == bos and ids.count(bos) == 1
        # A rendered text handed to the tokenizer, which adds one of its own where there is none:
        assert tokenizer.encode(with_bos.render(TWO), special=True, add_bos=True) == ids
        without = ChatTemplate(PLAIN, tokenizer.special_tokens)
        assert bos not in without.encode(tokenizer, TWO).ids
        assert tokenizer.encode(without.render(TWO), special=True, add_bos=True).count(bos) == 1


def test_bytes_can_chat():
    tokenizer = load_tokenizer("bytes")
    ids, mask = ChatTemplate(PLAIN).encode(tokenizer, [{"role": "user", "content": "é"}, *TWO[1:2]])
    assert bytes(i for i, m in zip(ids, mask, strict=True) if m) == b"Yes\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n{% if %}", "line 2 is not a template"),
        ("\n\n{{ messages[0].content + 1 }}", "line 3 fails: TypeError"),
        ("{{ raise_exception('roles must alternate') }}", "refuses the conversation: roles must alternate"),
        ("{% include 'passwd' %}", "line 1 fails"),
        ("{{ ''.__class__.__mro__ }}", "may not touch: .*__class__"),
        ("{{ raise_exception.__globals__.os }}", "may not touch|undefined"),
        ("{{ cycler.__init__.__globals__ }}", "may not touch"),
        ("{{ (messages|attr('__class__')).mro() }}", "may not touch"),
        ("{{ '{0.__class__.mro}'.format(messages) }}", "may not touch"),
        ("{{ messages.append(1) }}", "may not touch"),
        ("{{ namespace(__init__=1) }}", "may not touch"),
        ("{% for i in range(10**9) %}{% endfor %}", "asks for too much"),
        ("{{ 'a' * 10**12 }}", "asks for too much"),
        ("{{ '{:>999999999999}'.format(1) }}", "asks for too much"),
        (
            "{% set n=namespace(x='a') %}{% for i in range(99) %}{% set n.x=n.x~n.x %}{% endfor %}",
            "too much|takes more",
        ),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "asks for too much"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than 0.2 s"),
        ("{% for i in range(99999) %}{{ 'long ' * 100 }}{% endfor %}", "writes more than 1,000,000 characters"),
        (
            "{% set x %}{% generation %}{% endgeneration %}{% generation %}a{% endgeneration %}{% endset %}b{{ x }}",
            "generation",
        ),
    ],
)
def test_what_fails_or_attacks_is_a_data_error_and_the_next_template_works(source, message):
    limits = Limits(output_characters=1_000_000, seconds=0.2)
    with pytest.raises(DataError, match=message) as error:
        ChatTemplate(source, limits=limits).render(TWO)
    assert error.value.remedy
    assert ChatTemplate("{{ messages[0].content }}").render(TWO) == "Hello"


def test_a_template_of_a_megabyte_is_refused():
    with pytest.raises(DataError, match="at most 1,048,576"):
        ChatTemplate(" " * (1 << 20) + "x")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "is a list of messages"),
        ("hello", "is a list of messages, not 'hello'"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "message 2 of a conversation has no role"),
        (["hello"], "message 1 of a conversation has no role"),
        ([{"role": "user", "content": object()}], "message 1 holds a object"),
    ],
)
def test_what_is_no_conversation_is_named(messages, message):
    with pytest.raises(DataError, match=message):
        ChatTemplate(PLAIN).render(messages)


def test_a_prompt_needs_no_answers_told_apart(tokenizers):
    """Qwen3 takes the thoughts out of earlier turns, and may be asked on."""
    for case in GOLDENS:
        if case["arguments"].get("add_generation_prompt"):
            tokenizer = tokenizers[case["tokenizer"]]
            template = ChatTemplate(unmarked(MARKED[case["template"]]), tokenizer.special_tokens)
            more = {name: value for name, value in case["arguments"].items() if name != "add_generation_prompt"}
            found = template.encode(tokenizer, case["messages"], add_generation_prompt=True, mask=False, **more)
            assert found == (case["ids"], [])


def test_a_template_that_rewrites_earlier_turns_is_an_error_with_the_turn():
    tokenizer = load_tokenizer("bytes")
    last = "{% for m in messages %}{{ '!' if loop.last and m.role == 'assistant' }}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"changes message 2 \(assistant\)"):
        ChatTemplate(last).encode(tokenizer, [*TWO[:3]])
    prompted = PLAIN.replace("assistant: ", "model: ")
    with pytest.raises(DataError, match=r"message 2 \(assistant\) does not follow"):
        ChatTemplate(prompted).encode(tokenizer, TWO)
    first = "{{ messages[0].content + '' }}" + PLAIN
    with pytest.raises(DataError, match=r"rendered up to message 1, an answer"):
        ChatTemplate(first).encode(tokenizer, TWO[1:])


def test_an_end_of_the_whole_conversation_and_opened_thoughts_are_no_part_of_an_answer(tokenizers):
    tokenizer = tokenizers["bpe"]
    chatml = unmarked(MARKED["chatml"])
    closed = chatml + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"  # as Phi-3
    opened = chatml.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")  # as DeepSeek R1
    assert opened != chatml
    expected = ChatTemplate(chatml).encode(tokenizer, TWO)
    assert ChatTemplate(opened).encode(tokenizer, TWO) == expected
    ids, mask = ChatTemplate(closed, tokenizer.special_tokens).encode(tokenizer, TWO)
    # The end of the conversation itself is text that the model learns to write behind its last answer.
    assert ids == [*expected.ids, tokenizer.eos_id]
    assert mask[: len(expected.ids) - 1] == expected.assistant_mask[:-1] and mask[-1] == 1


def test_answers_without_a_token_are_an_error():
    tokenizer = load_tokenizer("bytes")
    nowhere = "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"
    with pytest.raises(DataError, match="none of the 2 answers"):
        ChatTemplate(nowhere).encode(tokenizer, TWO)
    assert sum(ChatTemplate(nowhere).encode(tokenizer, TWO[:1]).assistant_mask) == 0


def test_templates_are_found_by_name_file_or_text(tmp_path):
    tokenizer_json = lzma.decompress((FIXTURES / "tokenizer.json.xz").read_bytes())
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json)
    with pytest.raises(DataError, match="has no chat template") as error:
        load_chat_template(load_tokenizer(str(tmp_path)))
    assert ".jinja" in error.value.remedy
    templates = [{"name": "default", "template": "d{{ bos_token }}"}, {"name": "tool_use", "template": "t"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates, "bos_token": "<bos>"}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert load_chat_template(tokenizer).render(TWO) == "d<bos>"
    assert load_chat_template(tokenizer, tools=True).render(TWO) == "t"
    assert load_chat_template(tokenizer, "tool_use").render(TWO) == "t"
    (tmp_path / "mine.jinja").write_text("m{{ bos_token }}")
    assert load_chat_template(tokenizer, str(tmp_path / "mine.jinja")).render(TWO) == "m<bos>"
    assert load_chat_template(tokenizer, "s{{ bos_token }}").render(TWO) == "s<bos>"
    with pytest.raises(DataError, match=r"no such file, .* has: default, tool_use"):
        load_chat_template(tokenizer, "rag")
    (tmp_path / "chat_template.jinja").write_text("f")
    assert load_chat_template(load_tokenizer(str(tmp_path))).render(TWO) == "f"


def test_today_is_the_day_that_the_environment_names(monkeypatch):
    from jtrain.data.chat_renderer import RENDERER

    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(86400 * 365))
    RENDERER.close()
    assert ChatTemplate("{{ strftime_now('%d %b %Y') }}").render(TWO) == "01 Jan 1971"
    RENDERER.close()


def test_a_part_that_a_template_leaves_out_is_refused():
    parts = ChatTemplate("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", {})
    named = ChatTemplate(
        "{% for p in messages[0].content if p.type in ['text', 'thought', 'audio'] %}{{ p.text }}{% endfor %}", {}
    )
    for kind, template, reads in (
        ("text", parts, True),
        ("thought", parts, False),
        ("thought", named, True),
        ("audio", named, False),
    ):
        messages = [{"role": "user", "content": [{"type": kind, "text": "w1"}]}]
        if reads:
            assert template.render(messages) == "w1"
        else:
            with pytest.raises(DataError, match=f"is of type '{kind}'"):
                template.render(messages)
