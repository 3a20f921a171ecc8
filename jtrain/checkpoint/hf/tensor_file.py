"""Opens safetensors files that may come from anyone: the header is measured before it is parsed.

The format (github.com/huggingface/safetensors): 8 bytes little endian, the length of the header; the header, JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_TENSORS = 500_000
"""Of a file: ten times what the largest published models have in all of theirs."""


def open_tensors(path: Path) -> Any:
    """`safetensors.safe_open` for numpy, of a file whose header is within the limits.

    Raises:
      SafetensorError: it is cut short, damaged, or over a limit.
      OSError: it can't be read.
    """
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        room = path.stat().st_size - 8
        if len(start) < 8 or length > room:
            raise SafetensorError(f"the header says {length:,} bytes, and {max(0, room):,} follow")
        if length > MAX_HEADER_BYTES:
            raise SafetensorError(f"a header of {length:,} bytes; at most {MAX_HEADER_BYTES:,} are read")
        count = file.read(length).count(b'"data_offsets"')
    if count > MAX_TENSORS:
        raise SafetensorError(f"{count:,} tensors; at most {MAX_TENSORS:,} are read")
    return safe_open(path, "np")
