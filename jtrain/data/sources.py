"""Records of text files, JSONL, Parquet and ArrayRecord, read by chunks that workers can share.

A .txt is one document; a record of the others is one. A record that can't be read comes out as a `Bad`, so that the
policy (`data.on_bad_record`) is decided in one place; a file that can't be read at all is an error.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

from jtrain.data.files import is_url, open_file, stat
from jtrain.errors import DataError

CHUNK_BYTES = 8 << 20
WHOLE_TEXT_BYTES = 16 << 20
_SEARCH_BYTES = 1 << 16
_SHOWN = 200
_ARRAY_RECORD_ERRORS = (ValueError, RuntimeError, IndexError)  # all that the library raises


@dataclass(frozen=True)
class Chunk:
    """A part of a file.

    Attributes:
      kind: text, jsonl, parquet or array_record.
      begin, end: bytes (text, jsonl), row groups (parquet) or records (array_record); end -1: all of it.
      size: its share of the file's bytes, for the progress bar.
      opens, closes: whether a document begins and ends with it (only a long text is cut inside a document).
    """

    path: str
    kind: str
    begin: int = 0
    end: int = -1
    size: int = 0
    opens: bool = True
    closes: bool = True


@dataclass(frozen=True)
class Bad:
    """Why a record can't be used, what to do, the beginning of its content, and a digest of the whole of it.

    The digest is that of the record's bytes, without the white space around a line; empty: they could not be read.
    """

    reason: str
    remedy: str
    content: str
    digest: str = ""


def digest_of(content: bytes) -> str:
    """Hex digest of a record, by which a quarantined one is found again."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def plan_chunks(
    path: str, kind: str, chunk_bytes: int = CHUNK_BYTES, whole_text: int = WHOLE_TEXT_BYTES
) -> list[Chunk]:
    """Cuts a file into chunks of about `chunk_bytes`.

    A text of more than `whole_text` bytes is cut at spaces between words, which is where tokenizers cut, too
    (one that puts a space before a text puts one before each such part).
    """
    size = stat(path)[0]
    if kind == "parquet":
        return _plan_groups(path, chunk_bytes)
    if kind == "array_record":
        with _array_record(path) as reader:
            records = int(reader.num_records())
        step = max(1, records * chunk_bytes // max(1, size))
        ranges = [(begin, min(records, begin + step)) for begin in range(0, records, step)]
        return [Chunk(path, kind, a, b, size * (b - a) // records) for a, b in ranges]
    if path.lower().endswith(".gz") or size <= (whole_text if kind == "text" else chunk_bytes):
        return [Chunk(path, kind, size=size)]
    cuts = [*range(0, size, chunk_bytes), size]
    if kind == "text":
        with open_file(path) as file:
            cuts = sorted({0, *(_word_cut(file, cut, size) for cut in cuts[1:-1]), size})
    return [
        Chunk(path, kind, a, b, b - a, kind == "jsonl" or a == 0, kind == "jsonl" or b == size)
        for a, b in itertools.pairwise(cuts)
    ]


def read_chunk(chunk: Chunk, text_field: str) -> Iterator[str | Bad | None]:
    """Texts of a chunk in order; a Bad for a record that can't be used, None for a blank line.

    Raises:
      DataError: the file itself can't be read, or has no such column.
    """
    readers: dict[str, Callable[[], Iterator[str | Bad | None]]] = {
        "text": lambda: _read_text(chunk),
        "jsonl": lambda: _read_jsonl(chunk, lambda line: _from_json(line, text_field)),
        "parquet": lambda: _read_parquet(chunk, text_field),
        "array_record": lambda: _read_array_record(chunk, lambda content: _from_json(content, text_field)),
    }
    yield from _readable(chunk, readers[chunk.kind]())


def read_records(chunk: Chunk, text_field: str) -> Iterator[dict[str, Any] | Bad | None]:
    """Whole records of a chunk in order, with all of their fields; a text is a record with `text_field`.

    A Bad stands for a record that can't be read, None for a blank line.

    Raises:
      DataError: the file itself can't be read.
    """
    readers: dict[str, Callable[[], Iterator[Any]]] = {
        "text": lambda: (text if isinstance(text, Bad) else {text_field: text} for text in _read_text(chunk)),
        "jsonl": lambda: _read_jsonl(chunk, _record),
        "parquet": lambda: _read_parquet_records(chunk),
        "array_record": lambda: _read_array_record(chunk, _record),
    }
    yield from _readable(chunk, readers[chunk.kind]())


def _readable(chunk: Chunk, records: Iterator[Any]) -> Iterator[Any]:
    count = 0
    try:
        for record in records:
            yield record
            count += 1
    except (OSError, EOFError, zlib.error) as error:
        # Of a compressed file there is one chunk: what was read before is the number of the last whole line.
        place = f" after line {count}" if chunk.kind == "jsonl" and chunk.path.lower().endswith(".gz") else ""
        raise DataError(
            f"{chunk.path} can't be read{place}: {error}", "The file may be damaged or cut short: fetch it again."
        ) from error


def _read_text(chunk: Chunk) -> Iterator[str | Bad]:
    with _opened(chunk.path) as file:
        file.seek(chunk.begin)
        content = file.read(chunk.end - chunk.begin if chunk.end >= 0 else -1)
    if chunk.begin == 0:
        content = content.removeprefix(b"\xef\xbb\xbf")
    yield _with_digest(_decoded(content, chunk.begin), content)


def _read_jsonl(chunk: Chunk, parse: Callable[[bytes], Any]) -> Iterator[Any]:
    """What `parse` makes of the lines that begin inside the chunk; None for a blank one."""
    with _opened(chunk.path) as file:
        place = chunk.begin
        if place:
            file.seek(place - 1)
            place += len(file.readline()) - 1
        while chunk.end < 0 or place < chunk.end:
            line = file.readline()
            if not line:
                return
            if place == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            place += len(line)
            content = line.strip()
            yield _with_digest(parse(line), content) if content else None


def _read_parquet(chunk: Chunk, text_field: str) -> Iterator[str | Bad]:
    with _parquet(chunk.path) as table:
        names = table.schema_arrow.names
        if text_field not in names:
            raise DataError(
                f"{chunk.path}: there is no column {text_field!r}; the columns are: {', '.join(names)}",
                "Set data.text_field to one of them.",
            )
        import pyarrow as pa

        groups = list(range(chunk.begin, chunk.end))
        for batch in table.iter_batches(1024, row_groups=groups, columns=[text_field]):
            column = batch.column(0)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            if pa.types.is_string(column.type):
                column = column.cast(pa.binary())  # checked record by record, not by the column
            elif pa.types.is_large_string(column.type):
                column = column.cast(pa.large_binary())
            for value in column.to_pylist():
                if isinstance(value, bytes):
                    yield _with_digest(_decoded(value), value)
                else:
                    yield _with_digest(_text(value, text_field), repr(value).encode())


def _read_parquet_records(chunk: Chunk) -> Iterator[dict[str, Any] | Bad]:
    with _parquet(chunk.path) as table:
        for batch in table.iter_batches(256, row_groups=list(range(chunk.begin, chunk.end))):
            try:
                yield from batch.to_pylist()
            except UnicodeDecodeError:
                for row in range(batch.num_rows):
                    yield _parquet_row(batch.slice(row, 1))


def _parquet_row(row: Any) -> dict[str, Any] | Bad:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        shown = repr(error.object[max(0, error.start - 40) : error.start + 40])[:_SHOWN]
        return Bad(f"holds text that is not UTF-8: {error.reason}", "Convert it.", shown, digest_of(error.object))


def _read_array_record(chunk: Chunk, parse: Callable[[bytes], Any]) -> Iterator[Any]:
    with _array_record(chunk.path) as reader:
        for begin in range(chunk.begin, chunk.end, 1024):
            end = min(chunk.end, begin + 1024)
            try:
                records = reader.read(begin, end)
            except _ARRAY_RECORD_ERRORS:
                records = [_array_record_alone(reader, number) for number in range(begin, end)]
            for record in records:
                yield record if isinstance(record, Bad) else _with_digest(parse(record), record)


def _array_record_alone(reader: Any, number: int) -> bytes | Bad:
    """One record. A damaged one costs those that were compressed together with it, and no others."""
    try:
        return reader.read(number, number + 1)[0]
    except _ARRAY_RECORD_ERRORS as error:
        return Bad(f"can't be read: {str(error)[:_SHOWN]}", "The file is damaged: fetch it again.", "")


def _with_digest(found: Any, content: bytes) -> Any:
    return replace(found, digest=digest_of(content)) if isinstance(found, Bad) else found


def _from_json(line: bytes, text_field: str) -> str | Bad:
    record = _record(line)
    if isinstance(record, Bad):
        return record
    if text_field not in record:
        fields = ", ".join(record) or "none"
        return Bad(
            f"has no field {text_field!r}; its fields are: {fields}",
            "Set data.text_field to one.",
            line.decode("utf-8")[:_SHOWN],
        )
    return _text(record[text_field], text_field)


def _record(line: bytes) -> dict[str, Any] | Bad:
    text = _decoded(line)
    if isinstance(text, Bad):
        return text
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Bad(f"is not JSON: {error}", "Write one JSON object a line.", text[:_SHOWN])
    if not isinstance(record, dict):
        kind = "null" if record is None else type(record).__name__
        return Bad(f"is not a JSON object but {kind}", 'Write {"text": ...} a line.', text[:_SHOWN])
    return record


def _text(value: Any, text_field: str) -> str | Bad:
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        return Bad(f"has no text in field {text_field!r} but {kind}", "Remove the record.", repr(value)[:_SHOWN])
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return Bad(f"holds half of a surrogate pair at character {error.start}", "Repair it.", ascii(value)[:_SHOWN])
    return value


def _decoded(content: bytes, offset: int = 0) -> str | Bad:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        shown = content[max(0, error.start - 40) : error.start + 40].decode("utf-8", "backslashreplace")
        return Bad(
            f"is not UTF-8: byte 0x{content[error.start]:02x} at {offset + error.start}",
            "Convert it, e.g. `iconv -f latin1 -t utf-8`.",
            shown,
        )


def _word_cut(file: BinaryIO, place: int, size: int) -> int:
    """The first place at or after `place` where a space follows something else; there every encoding of UTF-8 is whole.

    A text without spaces is cut between two characters.
    """
    file.seek(place - 1)
    window = file.read(_SEARCH_BYTES)
    for at in range(1, len(window)):
        if window[at : at + 1].isspace() and not window[at - 1 : at].isspace():
            return place - 1 + at
    at = next((at for at in range(1, len(window)) if window[at] & 0xC0 != 0x80), len(window))
    return min(size, place - 1 + at)


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    with open_file(path) as file:
        if path.lower().endswith(".gz"):
            with gzip.open(file) as inner:
                yield cast(BinaryIO, inner)
        else:
            yield file


@contextmanager
def _parquet(path: str) -> Iterator[Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(f"{path} needs the pyarrow package", "pip install pyarrow") from error
    with open_file(path) as file:
        try:
            table = pq.ParquetFile(file, page_checksum_verification=True)  # where the writer left checksums
        except pa.ArrowException as error:
            raise DataError(
                f"{path} ({stat(path)[0]:,} bytes) is not a Parquet file: {error}",
                "It may be damaged or cut short: fetch it again.",
            ) from error
        try:
            yield table
        except pa.ArrowException as error:
            raise DataError(f"{path} can't be read: {error}", "The file may be damaged: fetch it again.") from error


def _plan_groups(path: str, chunk_bytes: int) -> list[Chunk]:
    chunks = []
    with _parquet(path) as table:
        begin = size = 0
        for group in range(table.num_row_groups):
            size += table.metadata.row_group(group).total_byte_size
            if size >= chunk_bytes or group + 1 == table.num_row_groups:
                chunks.append(Chunk(path, "parquet", begin, group + 1, size))
                begin, size = group + 1, 0
    return chunks


@contextmanager
def _array_record(path: str) -> Iterator[Any]:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise DataError(f"{path} needs the array_record package", "pip install array_record") from error
    with tempfile.TemporaryDirectory() as folder:
        local = path
        if is_url(path):  # the reader opens local paths only
            local = f"{folder}/copy.array_record"
            with open_file(path) as source, open(local, "wb") as target:
                shutil.copyfileobj(source, target)
        else:
            open_file(path).close()
        try:
            reader = ArrayRecordReader(local)
            yield reader
            reader.close()  # a damaged file opens, and reads as an empty one: only this tells
        except _ARRAY_RECORD_ERRORS as error:
            reason = str(error) or "it is cut short, or no ArrayRecord"  # of a truncated file the library says nothing
            raise DataError(
                f"{path} ({stat(path)[0]:,} bytes) can't be read as ArrayRecord: {reason}",
                "The file may be damaged or cut short: fetch it again.",
            ) from error
