"""Text to rows to sharded batches. Names are loaded when they are first used, so that importing this costs nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jtrain.data.arrays import ArrayRows
    from jtrain.data.build import build_data
    from jtrain.data.loader import DataLoader
    from jtrain.data.packing import Plan, plan_rows
    from jtrain.data.rows import IGNORE, EvalRows, PackedRows, Rows, TrainRows
    from jtrain.data.store import TokenStore
    from jtrain.data.tokenizers import Tokenizer, load_tokenizer

_MODULES = {
    "build_data": "build",
    "ArrayRows": "arrays",
    "DataLoader": "loader",
    "Plan": "packing",
    "plan_rows": "packing",
    "IGNORE": "rows",
    "EvalRows": "rows",
    "PackedRows": "rows",
    "Rows": "rows",
    "TrainRows": "rows",
    "TokenStore": "store",
    "Tokenizer": "tokenizers",
    "load_tokenizer": "tokenizers",
}

__all__ = [
    "IGNORE",
    "ArrayRows",
    "DataLoader",
    "EvalRows",
    "PackedRows",
    "Plan",
    "Rows",
    "TokenStore",
    "Tokenizer",
    "TrainRows",
    "build_data",
    "load_tokenizer",
    "plan_rows",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
