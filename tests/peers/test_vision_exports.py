"""CLIP and SigLIP that jtrain exports are the same in `transformers`: every key, token ids, pixels, embeddings."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from jtrain import ContrastiveTrainer, load_dual_encoder
from jtrain.tasks.dual_encoder import encoder_of
from jtrain.tasks.dual_export import export_dual_encoder

from .test_exports import interpreter  # noqa: F401  a fixture

pytestmark = [pytest.mark.peers, pytest.mark.timeout(3600)]

MODELS = Path(__file__).parents[1] / "models" / "fixtures"
DIGITS = Path(__file__).parents[2] / "configs" / "assets" / "digits8x8.npz"


def test_embeddings_of_exports_are_those_of_transformers(interpreter, tmp_path):  # noqa: F811
    request, ours = {}, {}
    with np.load(DIGITS) as file:
        digits = file["images"][:3]
    for kind in ("clip", "siglip"):
        changed = load_dual_encoder(MODELS / kind)
        changed.params.update(jax.tree.map(lambda x: x * 1.03 + 0.01, changed.params))
        born = {"model": f"{kind}-tiny", "run_dir": str(tmp_path / f"run-{kind}"), "max_steps": 1, "devices": 1}
        trainer = ContrastiveTrainer("digits", **born, data={"eval": None}, compile_cache="")
        trainer.fit()
        for name, model, images in (
            (f"{kind} folder", changed, np.random.default_rng(0).integers(0, 256, (3, 20, 14, 3), np.uint8)),
            (f"{kind} born here", load_dual_encoder(tmp_path / f"run-{kind}"), digits),
        ):
            texts = ["a photo of the digit two", "zero"]
            export_dual_encoder(model, tmp_path / name)
            np.save(tmp_path / f"{name}.npy", images)
            length = model.config.text.max_position_embeddings
            request[name] = {"folder": str(tmp_path / name), "images": str(tmp_path / f"{name}.npy")}
            request[name] |= {"texts": texts, "length": length}
            ours[name] = {
                "image": model.embed_images(list(images)),
                "text": model.embed_texts(texts),
                "ids": encoder_of(model.config, model.tokenizer)(texts),
                "pixels": np.stack([model.files.transform(image) for image in images]).transpose(0, 3, 1, 2),
            }
    (tmp_path / "request.json").write_text(json.dumps(request))
    script = Path(__file__).parent / "transformers_embeddings.py"
    subprocess.run([interpreter, script, tmp_path / "request.json", tmp_path / "found.npz"], check=True)
    with np.load(tmp_path / "found.npz") as found:
        for name, parts in ours.items():
            for part, mine in parts.items():
                np.testing.assert_allclose(mine, found[f"{name}.{part}"], atol=1e-5, err_msg=f"{name} {part}")
