"""`load_dual_encoder(...)`'s vectors: what is taken as one or several, and what is refused."""

import numpy as np
import pytest
from PIL import Image

import jtrain
from jtrain.errors import DataError
from tests.tasks.test_llava import CLIP


@pytest.fixture(scope="module")
def model():
    return jtrain.load_dual_encoder(CLIP)


def test_one_text_and_one_image_are_lists_of_one(model, tmp_path):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8))
    picture.save(tmp_path / "a.png")
    wanted = model.embed_images([picture])
    for one in (
        str(tmp_path / "a.png"),
        tmp_path / "a.png",
        (tmp_path / "a.png").read_bytes(),
        picture,
        np.asarray(picture),
    ):
        np.testing.assert_array_equal(model.embed_images(one), wanted)
    np.testing.assert_array_equal(model.embed_texts("ab"), model.embed_texts(["ab"]))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "images is empty"),
        (3, "images is a int"),
        ([3], r"images\[0\]: an image is a int"),
        ("gone.png", r"images\[0\]: the image gone.png does not exist"),
    ],
)
def test_images_that_can_not_be_embedded_are_named(model, images, message):
    with pytest.raises(DataError, match=message):
        model.embed_images(images)


@pytest.mark.parametrize(
    ("texts", "message"),
    [([], "texts is empty"), (3, "texts is a int"), (["a", 3], r"texts\[1\] is a int"), (["\ud800"], "surrogate")],
)
def test_texts_that_can_not_be_embedded_are_named(model, texts, message):
    with pytest.raises(DataError, match=message):
        model.embed_texts(texts)
