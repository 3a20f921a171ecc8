"""Images with texts as rows: every form of a record, a pure function of (seed, row), errors by the record."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from jtrain.data.captions import caption_encoder, text_keys
from jtrain.data.image_texts import Fields, ImageTextRows, read_pairs
from jtrain.data.images import ImageTransform
from jtrain.data.tokenizers import load_tokenizer
from jtrain.errors import DataError

SHAPE = (4, 4, 3)
PLAIN = ImageTransform(do_resize=False, do_center_crop=False, do_rescale=False, do_normalize=False)
ENCODE = caption_encoder(load_tokenizer("bytes"), 8, begins=True, vocab_size=259)
IMAGES = np.random.default_rng(0).integers(0, 256, (5, *SHAPE), np.uint8)
TEXTS = ["one", "two", "three", "two", "a very long text"]
CLASSES = Fields(classes=("cat", "dog"), templates=("a {}", "my {}", "{}"))


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def rows(pairs, seed=None, **options):
    return ImageTextRows(pairs, ENCODE, PLAIN, SHAPE, seed=seed, **options)


def test_files_arrays_and_records_give_the_same_rows(tmp_path):
    (tmp_path / "pictures").mkdir()
    for n, image in enumerate(IMAGES):
        (tmp_path / "pictures" / f"{n}.png").write_bytes(png(image))
    lines = [json.dumps({"image": f"pictures/{n}.png", "caption": text}) for n, text in enumerate(TEXTS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    pq.write_table(
        pa.table({"image": [{"bytes": png(i), "path": "x"} for i in IMAGES], "text": TEXTS}), tmp_path / "r.parquet"
    )
    np.savez(tmp_path / "r.npz", images=IMAGES, texts=np.asarray(TEXTS))
    sources = [str(tmp_path / name) for name in ("rows.jsonl", "r.parquet", "r.npz")]
    sources += [{"image": IMAGES, "text": TEXTS}, [{"image": i, "text": t} for i, t in zip(IMAGES, TEXTS, strict=True)]]
    for source in sources:
        batch = rows(read_pairs(source, Fields(), field="data.train")).rows(np.arange(7))
        np.testing.assert_array_equal(batch["pixels"], IMAGES[[0, 1, 2, 3, 4, 4, 4]].astype(np.float32))
        np.testing.assert_array_equal(batch["input_ids"], ENCODE([*TEXTS, TEXTS[4], TEXTS[4]]))
        assert batch["label"].tolist() == [-1] * 7


def test_captions_end_with_their_token_and_are_padded():
    begin, end, pad = 257, 256, 258
    assert ENCODE(["ab", "abcdefghij"]).tolist() == [
        [begin, 97, 98, end, pad, pad, pad, pad],
        [begin, *range(97, 103), end],
    ]
    assert ENCODE.lengths(ENCODE(["ab", "abcdefghij"])).sum(1).tolist() == [4, 8]
    plain = caption_encoder(load_tokenizer("bytes"), 3, begins=False, vocab_size=259)
    assert plain(["a"]).tolist() == [[97, end, pad]]


def test_keys_are_equal_where_texts_are():
    keys = [tuple(key) for key in text_keys(TEXTS)]
    assert keys[1] == keys[3] and len(set(keys)) == 4


def test_labels_become_texts_by_templates_chosen_by_seed_and_row():
    pairs = read_pairs({"images": IMAGES, "labels": [0, 1, 1, 0, 1]}, CLASSES, field="x")
    stream, again, other = rows(pairs, seed=1), rows(pairs, seed=1), rows(pairs, seed=2)
    whole = stream.rows(np.arange(40))
    np.testing.assert_array_equal(whole["input_ids"][13:21], again.rows(np.arange(13, 21))["input_ids"])
    assert (whole["input_ids"] != other.rows(np.arange(40))["input_ids"]).any()
    forms = {"a cat", "my cat", "cat", "a dog", "my dog", "dog"}
    seen = {bytes(t for t in row if t < 256).decode() for row in whole["input_ids"].tolist()}
    assert seen == {text[:6] for text in forms}
    assert sorted(whole["label"][:5].tolist()) == [0, 0, 1, 1, 1]  # an epoch is a permutation
    assert rows(pairs).rows(np.arange(3))["label"].tolist() == [0, 1, 1]
    names = read_pairs([{"image": IMAGES[0], "label": "dog"}], CLASSES, field="x")
    assert names[0].label == 1 and names[0].texts == ("a dog", "my dog", "dog")


def test_every_pass_takes_one_of_several_texts():
    pairs = read_pairs([{"image": IMAGES[0], "text": ["one", "two"]}], Fields(), field="x")
    seen = {bytes(t for t in row if t < 256) for row in rows(pairs, seed=0).rows(np.arange(20))["input_ids"].tolist()}
    assert seen == {b"one", b"two"}


def test_an_evaluation_takes_the_first_text_of_every_record_and_the_templates_in_turn():
    several = [{"image": image, "text": ["one", "two"]} for image in IMAGES]
    batch = rows(read_pairs(several, Fields(), field="x")).rows(np.arange(5))
    np.testing.assert_array_equal(batch["input_ids"], ENCODE(["one"] * 5))
    classes = read_pairs({"images": IMAGES, "labels": [1] * 5}, CLASSES, field="x")
    expected = ENCODE(["a dog", "my dog", "dog", "a dog", "my dog"])
    np.testing.assert_array_equal(rows(classes).rows(np.arange(5))["input_ids"], expected)


def test_another_set_has_another_fingerprint():
    def fingerprint(images, texts):
        return rows(read_pairs({"image": images, "text": texts}, Fields(), field="x"), seed=0).fingerprint

    assert fingerprint(IMAGES, TEXTS) == fingerprint(IMAGES.copy(), list(TEXTS))
    assert fingerprint(IMAGES, TEXTS) != fingerprint(IMAGES[::-1], TEXTS)
    assert fingerprint(IMAGES, TEXTS) != fingerprint(IMAGES, TEXTS[::-1])


@pytest.mark.parametrize(
    ("source", "fields", "message"),
    [
        ([{"text": "a"}], Fields(), r"x\[0\] has no 'image'; its fields are text"),
        ([{"image": IMAGES[0]}], Fields(), r"x\[0\] has nothing as 'text'"),
        ([{"image": IMAGES[0], "label": 1}], Fields(), r"labels need contrastive\.classes"),
        ([{"image": IMAGES[0], "text": 3}], Fields(), "has 3 as 'text'"),
        ([{"image": IMAGES[0], "text": ""}], Fields(), "has '' as 'text'"),
        ([{"image": IMAGES[0], "label": 2}], CLASSES, "has the label 2"),
        ([{"image": IMAGES[0], "label": "cow"}], CLASSES, "has the label 'cow'"),
        (["a"], Fields(), r"x\[0\] is a str, no record"),
        ([], Fields(), "holds no record"),
        ({"image": IMAGES, "text": ["a"]}, Fields(), r"x has image \[5, 4, 4, 3\], text \[1\]"),
        ({"pictures": IMAGES}, Fields(), "Give images"),
        ({"image": np.asarray(3), "text": np.asarray("a")}, Fields(), r"x has image \[\], text \[\]"),
        ({"image": "a.png", "text": "abcde"}, Fields(), r"x has image \[\], text \[\]"),
        ({"image": {"path": "a.png"}, "text": {"a": 1}}, Fields(), r"x has image \[\], text \[\]"),
        ({"image": [IMAGES[0], IMAGES[0][:2]], "text": ["a"]}, Fields(), r"x has image \[2\], text \[1\]"),
        (3, Fields(), "x is a int"),
        ((pair for pair in ()), Fields(), "x is a generator"),
        ([{"image": IMAGES[0], "text": "a\ud800"}], Fields(), r"x\[0\]: a text holds half of a surrogate pair"),
    ],
)
def test_records_that_can_not_be_used_are_named(source, fields, message):
    with pytest.raises(DataError, match=message):
        read_pairs(source, fields, field="x")


def test_bad_files_and_images_are_named_with_their_record(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"image": "gone.png", "text": "a"}\n{"image": "gone.png"\n')
    with pytest.raises(DataError, match=r"rows\.jsonl: line 2 is not JSON"):
        read_pairs(str(path), Fields(), field="x")
    path.write_text('{"image": "gone.png", "text": "a"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl: line 1: the image .*gone\.png does not exist"):
        rows(read_pairs(str(path), Fields(), field="x")).rows(np.arange(1))
    (tmp_path / "gone.png").write_bytes(png(np.zeros((5, 4, 3), np.uint8)))
    with pytest.raises(DataError, match=r"line 1: an image becomes \[5, 4, 3\], and the model takes \[4, 4, 3\]"):
        rows(read_pairs(str(path), Fields(), field="x")).rows(np.arange(1))
    for name, content in (("a.npz", b"no"), ("b.npz", png(IMAGES[0]))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name):
            read_pairs(str(tmp_path / name), Fields(), field="x")
    with pytest.raises(DataError, match="does not exist"):
        read_pairs(str(tmp_path / "none.npz"), Fields(), field="x")
