"""Images: equal to transformers' processors (goldens of tests/peers/make_vision_goldens.py), read from every form."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jtrain.data.images import SIGLIP, ImageTransform, read_image
from jtrain.errors import CheckpointError, DataError
from tests.peers.make_vision_goldens import pictures

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)


def png(pixels=PIXELS):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_images_are_transformed_as_transformers_does(kind):
    transform = ImageTransform.from_folder(FIXTURES / kind)
    with np.load(FIXTURES / kind / "goldens.npz") as golden:
        wanted = golden["pixel_values"].transpose(0, 2, 3, 1)
    for picture, pixels in zip(pictures(), wanted, strict=True):
        np.testing.assert_array_equal(transform(Image.fromarray(picture)), pixels)
        np.testing.assert_array_equal(transform(picture), pixels)


def test_every_form_of_an_image_is_read(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    text = base64.b64encode(png()).decode()
    forms = [
        ("a.png", tmp_path), (tmp_path / "a.png", None), (png(), None), (text, None),
        (f"data:image/png;base64,{text}", None),
        ({"bytes": png(), "path": None}, None), ({"path": "a.png"}, tmp_path), (Image.fromarray(PIXELS), None),
        ((tmp_path / "a.png").as_uri(), None), (PIXELS, None), (PIXELS.tolist(), None), (PIXELS.astype(np.int64), None),
    ]  # fmt: skip
    for form, folder in forms:
        np.testing.assert_array_equal(np.asarray(read_image(form, folder=folder)), PIXELS)


def test_grey_and_transparent_images_become_rgb():
    plain = ImageTransform(do_resize=False, do_center_crop=False, do_rescale=False, do_normalize=False)
    grey = PIXELS[..., 0]
    np.testing.assert_array_equal(plain(grey), np.repeat(grey[..., None], 3, -1).astype(np.float32))
    clear = np.dstack([PIXELS, np.zeros((6, 5), np.uint8)])  # nothing is seen of it: white
    for image in (clear, Image.fromarray(clear)):
        np.testing.assert_array_equal(plain(image), np.full((6, 5, 3), 255.0, np.float32))
    raw = ImageTransform(do_convert_rgb=False, do_resize=False, do_center_crop=False, do_normalize=False)
    np.testing.assert_allclose(raw(grey)[..., 0], grey / 255.0, rtol=1e-6)


def test_a_camera_that_was_turned_is_turned_back():
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # 90 degrees
    Image.fromarray(PIXELS).save(file, "PNG", exif=exif)
    np.testing.assert_array_equal(np.asarray(read_image(file.getvalue())), np.rot90(PIXELS, -1))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("no.png", "the image .*no.png does not exist"),
        (b"not an image", "an image of 12 bytes is no image, or a damaged one"),
        (png()[:60], "damaged one"),
        ("data:image/png,abc", "begins with 'data:image/png'"),
        ("data:image/png;base64,%%%", "base64 can't be decoded"),
        (None, "an image is missing"),
        (3.5, "an image is a float"),
        ({}, r"fields \(none\)"),
        (PIXELS / 255.0, "holds float64"),
        (PIXELS.astype(np.int64) * 2, "holds numbers from 0 to 496"),
        (np.zeros((2, 2, 7), np.uint8), r"shape \(2, 2, 7\)"),
        (np.zeros((0, 2), np.uint8), r"shape \(0, 2\)"),
        ([[1, 2], [3]], "rows differ in length"),
        (Image.new("RGB", (0, 4)), "an image is 0 x 4 pixels"),
        ("https://example.org/a.png", "is an address"),
        ("gs://bucket/a.png", "is an address"),
        ("\ud800.png", "half of a surrogate pair"),
    ],
)
def test_what_is_no_image_is_refused(tmp_path, image, message):
    with pytest.raises(DataError, match=message):
        ImageTransform()(image, folder=tmp_path)


def test_a_file_goes_out_as_it_came_in():
    for transform in (
        ImageTransform(size=30, crop_size=(28, 20)),
        SIGLIP,
        ImageTransform(do_center_crop=False, size=(3, 4)),
    ):
        content = json.loads(json.dumps(transform.to_dict() | {"image_processor_type": "CLIPImageProcessor"}))
        back = ImageTransform.from_dict(content)
        assert back == transform or (not transform.do_center_crop and back.to_dict() == transform.to_dict())
    assert ImageTransform(size=30, crop_size=(28, 20)).output_size == (28, 20) and SIGLIP.output_size == (224, 224)
    assert ImageTransform(size=30, do_center_crop=False).output_size is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"size": {"longest_edge": 3}}, "size is"),
        ({"resample": 9}, "resample is 9"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std is"),
        ({"do_resize": "yes"}, "do_resize is 'yes'"),
        ({"do_pad": True}, "do_pad is True"),
        ({"crop_size": {"height": -1, "width": 2}}, "crop_size is"),
        ({"crop_size": -3}, "crop_size is -3"),
        ({"size": 0}, "size is 0"),
        ({"size": True}, "size is True"),
        ({"image_std": [0.5, 0.5]}, "image_mean has 3 values, and image_std 2"),
        ({"image_mean": []}, "image_mean has 0 values"),
    ],
)
def test_steps_that_are_not_known_are_refused(content, message):
    with pytest.raises(CheckpointError, match=message):
        ImageTransform.from_dict(content)


def test_a_folder_without_the_file_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json is missing"):
        ImageTransform.from_folder(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="can't be read"):
        ImageTransform.from_folder(tmp_path)


def test_a_damaged_image_is_named_by_its_file_alone(tmp_path):
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(DataError) as error:
        read_image("a.png", folder=tmp_path)
    assert error.value.message == f"{tmp_path / 'a.png'} is no image, or a damaged one"


@pytest.mark.parametrize("mode", ["1", "L", "I", "F", "I;16", "LAB", "HSV", "CMYK", "YCbCr", "PA", "RGBa", "RGBX"])
def test_every_mode_of_pillow_becomes_rgb(mode):
    transform = ImageTransform(size=(4, 4), do_center_crop=False)
    assert transform(Image.new(mode, (5, 6))).shape == (4, 4, 3)
    with pytest.raises(DataError, match="of the mode La"):
        transform(Image.new("La", (5, 6)))
