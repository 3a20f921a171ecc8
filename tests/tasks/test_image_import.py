"""A new model that sees: the layouts of a vision folder, and which tokens may stand for an image."""

import json
import shutil

import pytest

from jtrain.checkpoint.hf.folder import HfFolder
from jtrain.data.images import FILE, ImageTransform
from jtrain.errors import ConfigError
from jtrain.models.multimodal_config import ImageConfig
from jtrain.tasks.image_import import _processor, _tower, import_with_vision
from tests.tasks.test_llava import CLIP, text_model


def test_a_folder_as_transformers_5_writes_it_gives_the_same_processor(tmp_path):
    new = shutil.copytree(CLIP, tmp_path / "clip")
    content = json.loads((new / FILE).read_text())
    (new / FILE).unlink()
    (new / "processor_config.json").write_text(
        json.dumps({"processor_class": "CLIPProcessor", "image_processor": content})
    )
    found = []
    for path in (CLIP, new):
        folder = HfFolder(path)
        found.append(_processor(folder, ImageConfig(_tower(folder), 7), "<image>"))
    assert found[0] == found[1]
    assert ImageTransform.from_dict(json.loads(found[1][FILE])) == ImageTransform.from_folder(CLIP)


@pytest.mark.parametrize(("token", "message"), [("w1", "'w1' is an ordinary token"), ("", "empty"), (" ", "empty")])
def test_an_image_token_that_texts_hold_is_refused(token, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        import_with_vision(text_model(tmp_path / "text"), CLIP, tmp_path / "out", image_token=token)
    assert not (tmp_path / "out").exists()


def test_an_added_token_of_the_model_may_be_the_image_token(tmp_path):
    text = text_model(tmp_path / "text")
    content = json.loads((text / "tokenizer.json").read_text())
    entry = {"id": 88, "content": "<picture>", "single_word": False, "lstrip": False, "rstrip": False}
    content["model"]["vocab"] = {name: n for name, n in content["model"]["vocab"].items() if n != 88}
    content["added_tokens"].append({**entry, "normalized": False, "special": False})
    (text / "tokenizer.json").write_text(json.dumps(content))
    import_with_vision(text, CLIP, tmp_path / "out", image_token="<picture>")
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert config["image_token_index"] == 88
