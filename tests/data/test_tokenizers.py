import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jtrain.data.tokenizers import load_tokenizer
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
