"""Texts that UTF-8 can't hold: JSON may bring half of a surrogate pair ("\\ud800"), which no tokenizer reads."""

from __future__ import annotations

from collections.abc import Iterable

from jtrain.errors import DataError

_SHOWN = 60


def check_unicode(texts: Iterable[str], what: str = "a text") -> None:
    """Sees that every text is whole.

    Raises:
      DataError: one holds half of a surrogate pair.
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{what} holds half of a surrogate pair at character {error.start}: {ascii(text)[:_SHOWN]}",
                "Repair it.",
            ) from error
