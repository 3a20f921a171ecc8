"""Images in records: forms, places, tokens, what is refused, and the rows that come of them.

Goldens are made by tests/peers/make_llava_goldens.py (transformers' LlavaProcessor).
"""

import base64
import io
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jtrain import load_config
from jtrain.data.build import build_data
from jtrain.data.image_conversations import for_template, open_payload, payload_of, take_images
from jtrain.data.loader import DataLoader
from jtrain.data.packing import plan_examples
from jtrain.data.questions import read_questions
from jtrain.data.rows import IGNORE, EvalRows
from jtrain.data.tokenizers import load_tokenizer
from jtrain.errors import ConfigError, DataError
from jtrain.parallel.mesh import make_mesh
from jtrain.train.evaluation import FilledRows

HERE = Path(__file__).parents[1] / "tasks" / "fixtures" / "llava"
ROWS = json.loads((HERE / "rows.json").read_text())
KINDS = ("clip-llama", "siglip-qwen2")
IMAGE = 6
"""The image token."""
PNG = ROWS[0]["messages"][0]["content"][0]["base64"]


def rows_of(tmp_path, records, kind="clip-llama", folder=None, **changes):
    values = {"task": "sft", "max_length": 32, "data.cache_dir": str(tmp_path / "cache"), "data.shuffle": False}
    values |= {"run_dir": str(tmp_path / "run"), "sft.assistant_only_loss": True}
    path = tmp_path / "rows.jsonl"
    if not isinstance(records, str):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        records = str(path)
    config = load_config(values | {"data.train": [records]} | changes, (), {})
    rows, _ = build_data(config, load_tokenizer(str(folder or HERE / kind)), progress=False)
    return rows


def chat(*content, answer="w9", **more):
    user = {"role": "user", "content": content[0] if len(content) == 1 else list(content)}
    return {"messages": [user, {"role": "assistant", "content": answer}], **more}


def text(words):
    return {"type": "text", "text": words}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_masks_and_pixels_are_those_of_transformers(kind, tmp_path):
    golden = json.loads((HERE / kind / "goldens.json").read_text())
    rows = rows_of(tmp_path, ROWS, kind)
    batch = rows.rows(np.arange(len(rows)))
    assert len(rows) == len(golden["rows"]) == 5
    for number, row in enumerate(golden["rows"]):
        length = len(row["ids"])
        assert batch["input_ids"][number, :length].tolist() == row["ids"]
        assert (batch["labels"][number, :length] != IGNORE).astype(int).tolist() == row["mask"]
        assert not batch["segment_ids"][number, length:].any()
    assert (batch["labels"] != IMAGE).all()
    pixels = np.load(HERE / kind / "goldens.npz")["pixels"].transpose(0, 2, 3, 1)
    np.testing.assert_allclose(batch["pixel_values"][2], pixels, atol=1e-6)
    assert batch["pixel_values"].shape == (5, 2, 16, 16, 3)
    assert not batch["pixel_values"][3].any()  # a row without images


def test_every_form_of_an_image_gives_the_same_row(tmp_path):
    (tmp_path / "pictures").mkdir()
    path = tmp_path / "pictures" / "a.png"
    path.write_bytes(base64.b64decode(PNG))
    after = text(" w1 w2")
    forms = [
        chat({"type": "image", "base64": PNG}, after),
        chat({"type": "image", "image": "pictures/a.png"}, after),
        chat({"type": "image", "path": str(path), "text": None}, after),
        chat({"type": "image", "url": f"file://{path}"}, after),
        chat({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}, after),
        chat({"type": "image"}, after, images=["pictures/a.png"]),
        chat("<image>\n w1 w2", images=[{"path": "pictures/a.png", "bytes": None}]),
        chat(" w1 w2", images=["pictures/a.png"]),  # as in TRL: before the first message of the user
        {
            "conversations": [{"from": "human", "value": "<image>\n w1 w2"}, {"from": "gpt", "value": "w9"}],
            "image": "pictures/a.png",
        },
        {"prompt": chat("<image> w1 w2")["messages"][:1], "completion": [{"role": "assistant", "content": "w9"}]},
    ]
    forms[-1]["images"] = ["pictures/a.png"]
    found = [rows_of(tmp_path, [form]).rows(np.arange(1)) for form in forms]
    assert (found[0]["input_ids"] == IMAGE).sum() == 4
    for other in found[1:]:
        for name, values in found[0].items():
            np.testing.assert_array_equal(other[name], values, err_msg=name)


def test_the_order_of_the_places_is_that_of_the_images(tmp_path):
    paths = []
    for number in range(3):
        paths.append(str(tmp_path / f"{number}.png"))
        save(np.full((16, 16, 3), 100 * number, np.uint8), paths[-1])
    record = chat({"type": "image"}, text("w1"), {"type": "image", "path": paths[1]}, images=[paths[0], paths[2]])
    record["messages"] += [
        {"role": "user", "content": "w2 <image>"},
        {"role": "assistant", "content": "w3"},
    ]
    rows = rows_of(tmp_path, [record])
    pixels = rows.rows(np.arange(1))["pixel_values"][0]
    assert pixels.shape[0] == 4  # three, and room up to the next power of two
    levels = pixels[:, 0, 0, 0]
    assert levels[0] < levels[1] < levels[2] and levels[3] == 0


def save(pixels, path):
    from PIL import Image

    Image.fromarray(pixels).save(path)


def test_texts_of_another_column_have_places_too(tmp_path):
    record = {"prompt": "w1 <image> w2", "completion": " w3", "images": [f"data:image/png;base64,{PNG}"]}
    batch = rows_of(tmp_path, [record], **{"sft.assistant_only_loss": False}).rows(np.arange(1))
    assert (batch["input_ids"][0] == IMAGE).sum() == 4
    assert batch["pixel_values"].any()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (chat({"type": "image", "path": "none.png"}, text("w1")), "none.png does not exist"),
        (
            chat({"type": "image", "base64": base64.b64encode(b"no picture").decode()}, text("w1")),
            "no image, or a damaged",
        ),
        (chat({"type": "image", "base64": PNG[: len(PNG) // 2]}, text("w1")), "image"),
        (chat({"type": "image", "base64": "!"}, text("w1")), "can't be decoded"),
        (chat({"type": "image", "url": "https://example.org/a.png"}, text("w1")), "local files"),
        (chat({"type": "image"}, text("w1")), "more places of images than images"),
        (chat("<image> <image> w1", images=[f"data:image/png;base64,{PNG}"]), "more places"),
        (chat("<image> w1", images=[f"data:image/png;base64,{PNG}"] * 2), "2 images, and 1 places"),
        (chat({"type": "image", "path": "a.png", "base64": PNG}, text("w1")), "path and base64"),
        (chat("w1", images=[7]), "an image is a int"),
        (chat({"type": "image", "path": "\ud800.png"}, text("w1")), "half of a surrogate pair"),
        (chat("w1 \ud800"), "half of a surrogate pair"),
        (chat({"type": "audio", "path": "a.wav"}, text("w1")), "is of type 'audio'"),
        (chat({"type": "picture", "path": "a.png"}, text("w1")), "is of type 'picture'"),
        ({"text": "w1 <image> w2"}, "1 places of images in tokens, and 0 images"),
    ],
)
def test_what_can_not_be_read_is_named_by_its_line(record, message, tmp_path):
    first = {"text": "w1 w2"} if "text" in record else chat("w1")
    changes = {"sft.assistant_only_loss": False} if "text" in record else {}
    with pytest.raises(DataError, match=message) as error:
        rows_of(tmp_path, [first, record], **changes)
    assert "rows.jsonl: line 2" in error.value.message
    assert ". Or leave such records out: data.on_bad_record" in error.value.remedy  # two sentences
    assert error.value.remedy


def test_records_with_images_that_can_not_be_read_may_be_skipped(tmp_path, caplog):
    records = [chat("w1"), chat({"type": "image", "path": "none.png"}, text("w1"))]
    rows = rows_of(tmp_path, records, **{"data.on_bad_record": "skip"})
    assert len(rows) == 1
    assert "1 bad records" in caplog.text


def test_an_image_that_goes_missing_later_names_its_example(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(base64.b64decode(PNG))
    rows = rows_of(tmp_path, [chat("w1"), chat({"type": "image", "path": "a.png"}, text("w1"))])
    path.unlink()
    with pytest.raises(DataError, match=r"a\.png does not exist \(of example 1\)"):
        rows.rows(np.arange(2))


def test_a_model_of_texts_refuses_images(tmp_path):
    folder = tmp_path / "text"
    shutil.copytree(HERE / "clip-llama", folder)
    for name in ("processor_config.json", "config.json"):
        (folder / name).unlink()
    for images in (
        chat({"type": "image", "base64": PNG}, text("w1")),
        chat("<image> w1", images=[f"data:image/png;base64,{PNG}"]),
        {
            "image": "a.png",
            "conversations": [{"from": "human", "value": "<image>\nw1"}, {"from": "gpt", "value": "w2"}],
        },
        {"image": np.zeros((2, 2), np.uint8).tolist(), **chat("w1")},
        {"text": "w1", "image": "a.png"},
    ):
        plain = chat("w1 w2", images=[]) if "text" not in images else {"text": "w1", "image": None}
        changes = {"sft.assistant_only_loss": "text" not in images}
        for records, line in (([images, plain], "line 1"), ([plain, images], "line 2")):
            with pytest.raises(DataError, match="it holds images, and the model reads text alone") as error:
                rows_of(tmp_path, records, folder=folder, **changes)
            assert f"rows.jsonl: {line}" in error.value.message
            assert len(rows_of(tmp_path, records, folder=folder, **changes, **{"data.on_bad_record": "skip"})) == 1


@pytest.mark.parametrize(
    "record", [chat("<image> w1", image="a.png"), chat({"type": "image", "path": "a.png"}, text("w1"))]
)
def test_questions_with_images_are_named(record, tmp_path):
    tokenizer = load_tokenizer(str(HERE / "clip-llama"))
    config = load_config({"task": "sft", "data.train": ["x"]}, (), {})
    with pytest.raises(DataError, match="data: record 2 holds images: answers to them are not scored"):
        list(read_questions(config, tokenizer, [chat("w1"), record], field="--data", name="data"))
    tokenizer.images = None  # of a model of texts: such a record is a bad one
    skip = load_config({"task": "sft", "data.train": ["x"], "data.on_bad_record": "skip"}, (), {})
    found = read_questions(skip, tokenizer, [record, chat("w1")], field="--data", name="data")
    assert [question.reference for question in found] == ["w9"]


def test_the_text_of_a_user_makes_no_image(tmp_path):
    # This tokenizer has no other way to write the name; one of pieces of words would write it as text.
    with pytest.raises(DataError, match="1 places of images in tokens, and 0 images"):
        rows_of(tmp_path, [chat("w1 <image> w2")])
    batch = rows_of(tmp_path, [chat("w1 w2")]).rows(np.arange(1))
    assert "pixel_values" not in batch  # no record of the source has an image


# -- templates ---------------------------------------------------------------------------------------------------------


def test_templates_of_texts_get_the_image_token_in_the_text(tmp_path):
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.content ~ ' ' }}{% endfor %}")
    record = chat(text("w1"), {"type": "image", "base64": PNG})
    changes = {"data.chat_template": str(template), "sft.assistant_only_loss": False}
    batch = rows_of(tmp_path, [record], **changes).rows(np.arange(1))
    ids = batch["input_ids"][0][batch["segment_ids"][0] > 0].tolist()
    assert ids == [IMAGE] * 4 + [11, 19]  # <image> w1 w9: images first
    with pytest.raises(DataError, match="holds the image token"):
        rows_of(tmp_path, [chat(text("<image>"), {"type": "image", "base64": PNG})], **changes)


def test_templates_of_parts_alone_get_texts_as_parts():
    source = (
        "{% for m in messages %}{% for p in m.content %}{{ '<image>' if p.type == 'image' }}{% endfor %}{% endfor %}"
    )
    messages, meant = for_template([{"role": "user", "content": "w1"}], source, "<image>")
    assert messages == [{"role": "user", "content": [text("w1")]}] and not meant


def test_the_begin_token_is_added_where_the_model_expects_it_and_the_template_has_none(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(HERE / "clip-llama", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": True}))
    template = (folder / "chat_template.jinja").read_text()
    with_one = rows_of(tmp_path, ROWS, folder=folder).rows(np.arange(2))
    (folder / "chat_template.jinja").write_text(template.replace("{{ bos_token }}", ""))
    added = rows_of(tmp_path, ROWS, folder=folder).rows(np.arange(2))
    np.testing.assert_array_equal(with_one["input_ids"], added["input_ids"])


# -- rows --------------------------------------------------------------------------------------------------------------


def test_a_longer_example_is_cut_before_an_image_and_never_within(tmp_path):
    # bos, start, user, 4 of an image, w1: then 4 of another image from place 8 on.
    record = chat({"type": "image", "base64": PNG}, text(" w1 "), {"type": "image", "base64": PNG})
    record["messages"].insert(0, {"role": "assistant", "content": "w2"})
    whole = rows_of(tmp_path, [record]).rows(np.arange(1))
    held = whole["input_ids"][0] == IMAGE
    second = int(np.flatnonzero(held)[4])
    for length in (second + 1, second + 3):
        batch = rows_of(tmp_path, [record], max_length=length).rows(np.arange(1))
        assert (batch["segment_ids"] > 0).sum() == second
        assert (batch["input_ids"] == IMAGE).sum() == 4
        assert batch["pixel_values"].shape[1] == 1
    batch = rows_of(tmp_path, [record], max_length=second + 4).rows(np.arange(1))
    assert (batch["input_ids"] == IMAGE).sum() == 8


def test_a_cut_at_the_beginning_goes_behind_the_image():
    plan = plan_examples(
        np.asarray([0, 12]), np.ones(12, np.uint8), 9, "none", "keep_end", np.asarray([2, 7]), 3
    )  # images at 2-4 and 7-9: the last nine tokens begin at 3, within the first
    assert plan.starts.tolist() == [5] and plan.lengths.tolist() == [7]


def test_an_example_of_which_only_a_part_of_an_image_would_stay_is_left_out():
    plan = plan_examples(np.asarray([0, 6, 10]), np.ones(10, np.uint8), 3, "none", "keep_start", np.asarray([0]), 4)
    assert plan.starts.tolist() == [6]


@pytest.mark.parametrize("packing", ["concat", "best_fit_split"])
def test_a_packing_that_cuts_anywhere_is_refused(packing, tmp_path):
    with pytest.raises(ConfigError, match=f"data.packing: {packing}"):
        rows_of(tmp_path, ROWS, **{"data.packing": packing})


def test_packed_rows_have_their_images_in_the_order_of_their_tokens(tmp_path):
    alone, packed = rows_of(tmp_path, ROWS), rows_of(tmp_path, ROWS, max_length=64, **{"data.packing": "best_fit"})
    assert len(packed) < len(alone)
    one_by_one = {}
    for number in range(len(alone)):
        row = alone[number]
        used = (row["input_ids"] == IMAGE).sum() // 4
        one_by_one[row["input_ids"][row["segment_ids"] > 0].tobytes()] = row["pixel_values"][:used]
    for number in range(len(packed)):
        row = packed[number]
        segments = [row["input_ids"][row["segment_ids"] == s] for s in range(1, row["segment_ids"].max() + 1)]
        images = np.concatenate([one_by_one[segment.tobytes()] for segment in segments])
        np.testing.assert_array_equal(row["pixel_values"][: len(images)], images)


def test_a_batch_has_room_for_the_most_images_of_its_rows_in_every_process(tmp_path):
    rows = rows_of(tmp_path, ROWS)
    assert [rows.image_slots(np.asarray([n])) for n in range(5)] == [1, 1, 2, 1, 2]
    sharding = NamedSharding(make_mesh(devices=jax.devices()[:1]), PartitionSpec(None, ("data", "fsdp")))
    with DataLoader(rows, global_batch_size=2, accumulation=2, sharding=sharding) as loader:
        first, second, again = loader[0], loader[1], loader[0]
    assert first["pixel_values"].shape == (2, 1, 1, 16, 16, 3)
    assert second["pixel_values"].shape == (2, 1, 2, 16, 16, 3)
    np.testing.assert_array_equal(first["pixel_values"], again["pixel_values"])


def test_an_evaluation_has_as_much_room_in_every_process(tmp_path, monkeypatch):
    rows = FilledRows(EvalRows(rows_of(tmp_path, ROWS).sources), 3, 2)  # rows 0, 1, 2, -; 3, 4, -, -
    assert rows.image_slots(np.arange(4)) == 2
    monkeypatch.setattr(DataLoader, "_local_rows", lambda loader: np.arange(2))  # of a process without row 2, which has
    monkeypatch.setattr(DataLoader, "_put", lambda loader, values: values)  # two images
    sharding = NamedSharding(make_mesh(devices=jax.devices()[:1]), PartitionSpec(None, ("data", "fsdp")))
    with DataLoader(rows, global_batch_size=4, sharding=sharding, prefetch=0) as loader:
        assert loader[0]["pixel_values"].shape[:2] == (2, 2)


def test_rows_of_a_source_without_images_stand_beside_others(tmp_path):
    plain = tmp_path / "plain.jsonl"
    plain.write_text("".join(json.dumps(chat(f"w{n}")) + "\n" for n in range(3)))
    pictures = tmp_path / "pictures.jsonl"
    pictures.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rows = rows_of(tmp_path, "", **{"data.train": [str(plain), str(pictures)]})
    batch = rows.rows(np.arange(8))
    assert batch["pixel_values"].shape[:2] == (8, 2)
    assert not batch["pixel_values"][:3].any() and batch["pixel_values"][3].any()


# -- records -----------------------------------------------------------------------------------------------------------


def test_a_cache_is_read_as_it_was_made(tmp_path):
    first = rows_of(tmp_path, ROWS).rows(np.arange(5))
    again = rows_of(tmp_path, ROWS)
    assert again.sources[0].store.path is not None
    for name, values in again.rows(np.arange(5)).items():
        np.testing.assert_array_equal(values, first[name])


def test_records_may_move_with_their_pictures(tmp_path):
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(base64.b64decode(PNG))
        path = tmp_path / name / "rows.jsonl"
        path.write_text(json.dumps(chat({"type": "image", "path": "x.png"}, text("w1"))) + "\n")
        found.append(rows_of(tmp_path, str(path)))
    assert found[0].fingerprint == found[1].fingerprint
    (tmp_path / "a" / "x.png").unlink()
    assert found[1].rows(np.arange(1))["pixel_values"].any()


def test_images_in_memory_are_kept_without_a_loss():
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    for source in (pixels, Image.fromarray(pixels), file.getvalue(), {"bytes": file.getvalue(), "path": "x.png"}):
        np.testing.assert_array_equal(np.asarray(open_payload(payload_of(source), ".")), pixels)


@pytest.mark.parametrize("mode", ["1", "L", "I", "F", "I;16", "LAB", "HSV", "CMYK", "YCbCr", "PA", "RGBa", "RGBX"])
def test_images_in_memory_may_have_modes_that_a_png_lacks(mode):
    from PIL import Image

    image = Image.new("RGB", (5, 7), (200, 30, 90)).convert("L" if mode in ("I", "F", "I;16") else "RGB")
    if mode in ("PA", "RGBa"):
        image = image.convert("RGBA")
    image = image.convert({"PA": "P", "I;16": "I"}.get(mode, mode)).convert(mode)
    kept = open_payload(payload_of(image), ".")
    wanted = np.asarray(image.convert("RGB"), np.int32)
    np.testing.assert_array_equal(np.asarray(kept.convert("RGB"), np.int32), wanted)


def test_an_empty_image_in_memory_is_refused():
    from PIL import Image

    with pytest.raises(DataError, match="an image is 0 x 4 pixels"):
        payload_of(Image.new("RGB", (0, 4)))


def test_a_record_without_images_is_left_alone():
    record = {"messages": [{"role": "user", "content": "w1 <image>"}], "images": []}
    plain, taken = take_images(record, "<image>")
    assert plain["messages"] == record["messages"] and not taken
