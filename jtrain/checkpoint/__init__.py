"""Checkpoints: save, restore, integrity, retention, the lease of a run directory.

Here, and nowhere else, Orbax is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jtrain.checkpoint.checkpoints import Checkpoints
    from jtrain.checkpoint.lease import RunLease
    from jtrain.checkpoint.manifest import DamagedCheckpoint
    from jtrain.checkpoint.parameters import load_parameters
    from jtrain.checkpoint.run_dir import RunDir, open_run_dir

__all__ = ["Checkpoints", "DamagedCheckpoint", "RunDir", "RunLease", "load_parameters", "open_run_dir"]

_MODULES = {
    "Checkpoints": "checkpoints",
    "DamagedCheckpoint": "manifest",
    "RunDir": "run_dir",
    "RunLease": "lease",
    "load_parameters": "parameters",
    "open_run_dir": "run_dir",
}


def __getattr__(name: str) -> Any:
    # The lease and the run directory are opened before jax and Orbax are needed.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
