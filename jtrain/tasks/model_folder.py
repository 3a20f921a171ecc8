"""RUN/model: what is needed beside a checkpoint to use it when the folder, preset or config that made it is gone.

```
model/jtrain.json           the decoder's shape, and whether the tokenizer is that of bytes
model/config.json           Hugging Face's words for it, where a family has them
model/tokenizer.json, ...   tokenizer, chat template, generation config, as they were found
```
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from etils import epath

from jtrain.checkpoint.files import remove_tree, write_atomic
from jtrain.checkpoint.hf.companions import EXTRA_TEMPLATES, Companions
from jtrain.checkpoint.hf.folder import CONFIG
from jtrain.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from jtrain.errors import CheckpointError, ConfigError
from jtrain.models.config import DecoderConfig
from jtrain.models.lora import Lora
from jtrain.models.multimodal_config import image_config
from jtrain.models.rope_scaling import RopeScaling
from jtrain.tasks.companion_files import has_tokenizer

FOLDER = "model"
FILE = "jtrain.json"
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """The content of RUN/model.

    Attributes:
      decoder: the shape.
      companions: config.json and the small files.
      path: the folder, once it is written.
      bytes: whether the tokenizer is `bytes`, and the files only stand for it.
      lora: the adapters that the checkpoints hold beside the decoder; None: there are none.
    """

    decoder: DecoderConfig
    companions: Companions
    path: str = ""
    bytes: bool = False
    lora: Lora | None = None

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where there is none."""
        if self.bytes:
            return ByteTokenizer()
        return load_tokenizer(self.path) if has_tokenizer(self.companions) else None


def write_model_folder(run: epath.Path, content: ModelFolder) -> None:
    """Writes RUN/model; what another start left there goes."""
    text = {"decoder": dataclasses.asdict(content.decoder), "tokenizer": "bytes" if content.bytes else "files"}
    if content.lora is not None:
        text["lora"] = dataclasses.asdict(content.lora)
    write_files(run, content.companions, text)


def write_files(run: epath.Path, companions: Companions, text: Mapping[str, Any]) -> None:
    """Writes RUN/model: config.json, the small files, and jtrain.json with this content."""
    folder = run / FOLDER
    remove_tree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = dict(companions.files)
    if companions.config:
        files[CONFIG] = (json.dumps(companions.config, indent=2) + "\n").encode()
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / name, data)
    # Last: a folder with this file is whole.
    write_atomic(folder / FILE, (json.dumps(text, indent=2) + "\n").encode())


def has_model_folder(run: epath.Path) -> bool:
    """Whether RUN/model is there and whole."""
    return (run / FOLDER / FILE).exists()


def read_model_folder(run: epath.Path) -> ModelFolder:
    """Reads RUN/model.

    Raises:
      CheckpointError: it is missing or damaged.
    """

    def content(text: dict[str, Any], companions: Companions, folder: str) -> ModelFolder:
        if "dual_encoder" in text:
            raise ConfigError(
                f"{run} holds a model of images and texts, not a language model",
                "write task: contrastive, or use jtrain.load_dual_encoder",
            )
        lora = _lora(text.get("lora"))
        return ModelFolder(decoder_of_json(text["decoder"]), companions, folder, text["tokenizer"] == "bytes", lora)

    return read_files(run, content)


def read_files(run: epath.Path, use: Callable[[dict[str, Any], Companions, str], T]) -> T:
    """`use(content of jtrain.json, the other files, the folder)` of RUN/model.

    Raises:
      CheckpointError: it is missing or damaged.
    """
    folder = run / FOLDER
    try:
        text = json.loads((folder / FILE).read_text())
        names = [path.name for path in folder.iterdir() if path.name != FILE and not path.is_dir()]
        extra = folder / EXTRA_TEMPLATES
        names += [f"{EXTRA_TEMPLATES}/{path.name}" for path in extra.iterdir()] if extra.exists() else []
        files = {name: (folder / name).read_bytes() for name in sorted(names)}
        config = json.loads(files.pop(CONFIG, b"{}"))
        return use(text, Companions(config, files), str(folder))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder / FILE} is missing: {run} is no run of a decoder, or of an older version",
            "give a run that jtrain pretrain (or import) made",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / FILE} is damaged: {error}", "bring it back from a copy") from error


def _lora(fields: Mapping[str, Any] | None) -> Lora | None:
    return None if fields is None else Lora(**{**fields, "targets": tuple(fields["targets"])})


def decoder_of_json(fields: Mapping[str, Any]) -> DecoderConfig:
    """The shape from JSON, whose lists were tuples."""
    known = {field.name for field in dataclasses.fields(DecoderConfig)}
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"it has the field {unknown[0]!r}, which this version does not know")
    values = _tuples(fields)
    if values.get("rope_scaling") is not None:
        values["rope_scaling"] = RopeScaling(**_tuples(values["rope_scaling"]))
    if values.get("images") is not None:
        values["images"] = image_config(values["images"])
    return DecoderConfig(**values)


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
