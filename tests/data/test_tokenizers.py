import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jtrain.data.tokenizers import StreamDecoder, load_tokenizer
from jtrain.errors import DataError

CORPUS = ["the cat sat on the mat", "a naïve façade — 東京 🙂", "tabs\tand\nlines", "the end"] * 5
TEXT = "the naïve cat — 東京 🙂\n\tsat </s> here"


def byte_level(path, *, special=("<pad>", "</s>"), **changes):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    for name, value in changes.items():
        setattr(backend, name, value)
    backend.save(str(path))
    return backend


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    import sentencepiece

    folder = tmp_path_factory.mktemp("spm")
    (folder / "text").write_text("\n".join(CORPUS), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return str(folder / "tokenizer.model")


def test_bytes_are_utf_8():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode_batch(["é!", ""]) == [[0xC3, 0xA9, 0x21], []]
    assert tokenizer.decode([0xC3, 0xA9, tokenizer.eos_id, 0x21]) == "é!"
    sizes = tokenizer.token_bytes()
    assert (sizes[:256].tolist(), sizes[256:].tolist()) == ([1] * 256, [0, 0, 0])


def test_ids_equal_the_library_s_own(tmp_path):
    backend = byte_level(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    text = "the cat — 東京"
    assert tokenizer.encode_batch([text]) == [backend.encode(text, add_special_tokens=False).ids]
    assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text


def test_a_folder_stands_for_the_tokenizer_in_it(tmp_path, sentencepiece_model):
    byte_level(tmp_path / "tokenizer.json")
    folder, file = load_tokenizer(str(tmp_path)), load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert folder.fingerprint == file.fingerprint
    assert load_tokenizer(sentencepiece_model.rpartition("/")[0]).vocab_size == 320


def test_truncation_and_padding_stored_in_the_file_do_nothing(tmp_path):
    backend = byte_level(tmp_path / "plain.json")
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "cut.json"))
    texts = ["the cat sat on the mat", "a"]
    plain, cut = (load_tokenizer(str(tmp_path / name)) for name in ("plain.json", "cut.json"))
    assert cut.encode_batch(texts) == plain.encode_batch(texts)


def test_the_name_of_a_special_token_in_a_text_is_text(tmp_path):
    byte_level(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode_batch(["a</s>b"])[0]
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "a</s>b"


def test_special_tokens_are_those_of_the_configuration_beside_it(tmp_path):
    byte_level(tmp_path / "tokenizer.json", special=("<pad>", "</s>", "<|stop|>", "<s>"))
    assert load_tokenizer(str(tmp_path)).eos_id == 1  # the usual name
    config = {"eos_token": {"content": "<|stop|>"}, "bos_token": "<s>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (2, 3, 0)


def test_the_vocabulary_reaches_to_the_largest_id(tmp_path):
    backend = byte_level(tmp_path / "tokenizer.json")
    backend.add_special_tokens([AddedToken("<extra>", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).vocab_size == backend.token_to_id("<extra>") + 1


def test_token_bytes_add_up_to_the_text(tmp_path):
    byte_level(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(str(tmp_path))
    sizes = tokenizer.token_bytes()
    assert sizes[np.asarray(tokenizer.encode_batch([TEXT])[0])].sum() == len(TEXT.encode())
    assert sizes[tokenizer.eos_id] == 0


def test_sentencepiece_bytes_add_up_but_for_the_space_before_the_text(sentencepiece_model):
    tokenizer = load_tokenizer(sentencepiece_model)
    ids = tokenizer.encode_batch([TEXT])[0]
    assert tokenizer.token_bytes()[np.asarray(ids)].sum() == len(TEXT.encode()) + 1
    assert tokenizer.decode(ids) == TEXT
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.eos_id not in ids


def test_bytes_are_unknown_where_the_text_is_changed_first(tmp_path):
    byte_level(
        tmp_path / "tokenizer.json", normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    )
    assert load_tokenizer(str(tmp_path)).token_bytes() is None


def test_the_fingerprint_is_of_the_content_not_the_path(tmp_path):
    byte_level(tmp_path / "a.json")
    (tmp_path / "b.json").write_bytes((tmp_path / "a.json").read_bytes())
    byte_level(tmp_path / "c.json", special=("<pad>", "</s>", "<x>"))
    first, copy, other = (load_tokenizer(str(tmp_path / name)).fingerprint for name in ("a.json", "b.json", "c.json"))
    assert first == copy != other


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.json", None, "does not exist"),
        ("bad.json", b"{}", "is not a tokenizer.json"),
        ("bad.json", b"\xff\xfe", "is not a tokenizer.json"),
        ("bad.model", b"no model", "is not a SentencePiece model"),
        ("words.txt", b"a\nb", "is of no known kind"),
    ],
)
def test_what_is_no_tokenizer_is_a_data_error_that_names_it(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        load_tokenizer(str(tmp_path / name))
    assert name in str(error.value)
    assert "tokenizer.json" in str(error.value.remedy)


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))


def write(folder, **files):
    """JSON files beside a tokenizer: name (with _ for the dot) and content."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_stop_ids_are_those_of_the_generation_config_and_the_end_token(tmp_path):
    byte_level(tmp_path / "tokenizer.json", special=("<pad>", "</s>", "<|end|>", "<s>"))
    assert load_tokenizer(str(tmp_path)).stop_ids == (1,)
    write(tmp_path, config={"eos_token_id": 2})
    assert load_tokenizer(str(tmp_path)).stop_ids == (2, 1)
    write(tmp_path, generation_config={"eos_token_id": [3, 1]})
    assert load_tokenizer(str(tmp_path)).stop_ids == (3, 1)
    (tmp_path / "config.json").write_text("not of a model")
    write(tmp_path, generation_config={"eos_token_id": None})
    assert load_tokenizer(str(tmp_path)).stop_ids == (1,)


def test_special_tokens_may_stand_in_the_older_file_or_be_none(tmp_path):
    byte_level(tmp_path / "tokenizer.json", special=("<pad>", "</s>", "<|end|>", "<s>"))
    write(tmp_path, special_tokens_map={"eos_token": "<|end|>", "bos_token": {"content": "<s>"}, "pad_token": "</s>"})
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (2, 3, 1)
    write(tmp_path, tokenizer_config={"bos_token": None, "pad_token": "<pad>", "sep_token": "</s>"})
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (2, None, 0)
    assert tokenizer.special_tokens == {"eos_token": "<|end|>", "pad_token": "<pad>", "sep_token": "</s>"}


def test_a_prompt_begins_with_one_begin_token_where_the_model_expects_it(tmp_path):
    backend = byte_level(tmp_path / "tokenizer.json", special=("<pad>", "</s>", "<s>"))
    plain = backend.encode("the cat", add_special_tokens=False).ids
    assert load_tokenizer(str(tmp_path)).encode("the cat") == plain
    write(tmp_path, tokenizer_config={"add_bos_token": True})
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("the cat") == tokenizer.encode("<s>the cat", special=True) == [2, *plain]
    assert tokenizer.encode("the cat", add_bos=False) == plain
    assert tokenizer.encode_batch(["the cat"]) == [plain]
    # The file's own post-processor counts where the settings say nothing, and not against them.
    template = processors.TemplateProcessing(single="<s>:0 $A:0", special_tokens=[("<s>", 2)])
    byte_level(tmp_path / "tokenizer.json", special=("<pad>", "</s>", "<s>"), post_processor=template)
    write(tmp_path, tokenizer_config={})
    assert load_tokenizer(str(tmp_path)).encode("the cat") == [2, *plain]
    write(tmp_path, tokenizer_config={"add_bos_token": False})
    assert load_tokenizer(str(tmp_path)).encode("the cat") == plain


def test_a_begin_token_that_is_not_there_is_an_error(tmp_path):
    byte_level(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="no begin-of-sequence token"):
        load_tokenizer(str(tmp_path)).encode("a", add_bos=True)


def test_names_of_special_tokens_are_tokens_on_request(tmp_path, sentencepiece_model):
    byte_level(tmp_path / "tokenizer.json")
    for tokenizer in (load_tokenizer(str(tmp_path)), load_tokenizer(sentencepiece_model)):
        ids = tokenizer.encode("the</s> cat", special=True, add_bos=False)
        assert ids.count(tokenizer.eos_id) == 1 and tokenizer.special_ids() >= {tokenizer.eos_id}
        assert tokenizer.decode(ids) == "the cat"
        assert tokenizer.decode(ids, skip_special=False) == "the</s> cat"
        assert tokenizer.eos_id not in tokenizer.encode("the</s> cat")
        assert tokenizer.token_to_id("</s>") == tokenizer.eos_id and tokenizer.id_to_token(tokenizer.eos_id) == "</s>"
        assert tokenizer.token_to_id("no such token") is None


@pytest.mark.parametrize("special", [False, True])
def test_offsets_are_the_characters_of_each_token(tmp_path, sentencepiece_model, special):
    byte_level(tmp_path / "tokenizer.json")
    text = "naïve 東京 🙂</s> end"
    for tokenizer in (load_tokenizer(str(tmp_path)), load_tokenizer(sentencepiece_model), load_tokenizer("bytes")):
        ids, offsets = tokenizer.encode_with_offsets(text, special=special)
        assert ids == tokenizer.encode(text, special=special, add_bos=False) and len(offsets) == len(ids)
        covered = set()
        for token, (begin, end) in zip(ids, offsets, strict=True):
            assert 0 <= begin <= end <= len(text)
            covered.update(range(begin, end))
            piece = tokenizer.decode([token], skip_special=False).strip()
            assert piece in text[begin:end] or "\ufffd" in piece
        assert {text[place] for place in range(len(text)) if place not in covered} <= {" "}


def test_tokens_added_to_a_sentencepiece_model_have_their_ids(tmp_path, sentencepiece_model):
    (tmp_path / "tokenizer.model").write_bytes(Path(sentencepiece_model).read_bytes())
    plain = load_tokenizer(str(tmp_path))
    added = {
        "320": {"content": "<|user|>", "special": True},
        "321": {"content": "<think>", "special": False},
        "1": {"content": "<s>", "special": True},
    }
    write(
        tmp_path, tokenizer_config={"added_tokens_decoder": added, "add_bos_token": False}, added_tokens={"<|x|>": 322}
    )
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == 323 and tokenizer.fingerprint != plain.fingerprint
    assert tokenizer.encode("the cat") == plain.encode("the cat", add_bos=False)
    assert 320 not in tokenizer.encode("<|user|>the") and tokenizer.encode("<|user|>the", special=True)[0] == 320
    ids = tokenizer.encode("the cat<think> sat", special=True)
    assert ids.count(321) == 1 and tokenizer.encode_batch(["the cat<think> sat"])[0] == ids
    assert tokenizer.decode(ids) == "the cat<think> sat"
    assert tokenizer.decode([320, *ids]) == tokenizer.decode(ids)
    assert tokenizer.token_bytes()[[320, 321, 322]].tolist() == [0, len("<think>"), 0]
    assert (tokenizer.id_to_token(322), tokenizer.token_to_id("<think>")) == ("<|x|>", 321)


def test_a_growing_text_never_ends_inside_of_a_character(tmp_path, sentencepiece_model):
    byte_level(tmp_path / "tokenizer.json")
    text = " naïve 東京 🙂👩‍👩‍👧\n\n  x\ufffd Ωμέγα</s> end"
    for tokenizer in (load_tokenizer(str(tmp_path)), load_tokenizer(sentencepiece_model), load_tokenizer("bytes")):
        ids = tokenizer.encode(text, special=True, add_bos=False)
        for before in ([], tokenizer.encode("東京 the"), [tokenizer.eos_id]):
            decoder = StreamDecoder(tokenizer, before)
            pieces = [decoder.push(token) for token in ids]
            assert sum(piece.count("\ufffd") for piece in pieces) <= 1  # the text's own
            whole = tokenizer.decode([*before, *ids])
            assert tokenizer.decode(before) + "".join(pieces) + decoder.finish() == whole
        assert sum(map(bool, pieces)) > len(text) / 3  # as it grows, not at the end


def test_bytes_that_are_no_text_come_out_in_time():
    decoder = StreamDecoder(load_tokenizer("bytes"))
    pieces = [decoder.push(0xFF) for _ in range(100)]
    assert len("".join(pieces)) > 80 and "".join(pieces) + decoder.finish() == "\ufffd" * 100
    decoder = StreamDecoder(load_tokenizer("bytes"))
    assert [decoder.push(0xE6), decoder.push(0x9D), decoder.finish()] == ["", "", "\ufffd"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "{", "is not JSON"),
        ("generation_config.json", "[]", "holds no JSON object"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "has no template"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "../../x", "template": "y"}]}', r"names .* '../../x'"),
        ("tokenizer_config.json", "[" * 100_000, "is not JSON"),
    ],
)
def test_settings_that_cannot_be_read_are_named(tmp_path, name, content, message):
    byte_level(tmp_path / "tokenizer.json")
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message) as error:
        load_tokenizer(str(tmp_path))
    assert name in str(error.value) and error.value.remedy


def test_templates_come_from_settings_and_files(tmp_path):
    byte_level(tmp_path / "tokenizer.json")
    assert load_tokenizer(str(tmp_path)).chat_templates == {}
    write(tmp_path, tokenizer_config={"chat_template": "one"})
    assert load_tokenizer(str(tmp_path)).chat_templates == {"default": "one"}
    (tmp_path / "chat_template.jinja").write_text("two")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("three")
    assert load_tokenizer(str(tmp_path)).chat_templates == {"default": "two", "rag": "three"}


def test_half_of_a_surrogate_pair_is_refused_by_every_tokenizer(tmp_path, sentencepiece_model):
    byte_level(tmp_path / "tokenizer.json")
    for path in ("bytes", str(tmp_path / "tokenizer.json"), str(sentencepiece_model)):
        tokenizer = load_tokenizer(path)
        for encode in (tokenizer.encode_batch, lambda texts: tokenizer.encode_with_offsets(texts[1])):  # noqa: B023
            with pytest.raises(DataError, match=r"half of a surrogate pair at character 1: 'a\\ud800'"):
                encode(["a", "a\ud800"])
