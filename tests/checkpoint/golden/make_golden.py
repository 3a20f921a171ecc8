"""Makes the golden checkpoint of this release, which later ones have to restore (C13).

usage: python -m tests.checkpoint.golden.make_golden, once a release, on a CPU. Old folders are never made again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

STEP = 4
FIELDS = {"checkpoint": {"save_steps": 0}, "optimizer": {"name": "adamw", "ema_decay": 0.9}}


def digests(state: Any) -> dict[str, list[Any]]:
    """Path -> dtype, shape and SHA-256 of the bytes."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        value = np.asarray(leaf)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found[name] = [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    return found


def main() -> None:
    import jtrain
    from tests.train.fits import make

    folder = Path(__file__).parent / jtrain.__version__
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as made:
        trainer = make(Path(made) / "run", max_steps=STEP, **FIELDS)
        trainer.fit()
        shutil.copytree(Path(made) / "run" / "checkpoints", folder / "run" / "checkpoints")
        shutil.copy(Path(made) / "run" / ".run.json", folder / "run")
    expected = {
        "arrays": digests(trainer.state),
        "tokens": trainer.counters.tokens,
        "examples": trainer.counters.examples,
        "versions": {"jtrain": jtrain.__version__, "jax": jax.__version__},
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
