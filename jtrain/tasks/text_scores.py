"""Scores of generated text against references: BLEU, chrF and TER, ROUGE, exact match.

sacrebleu and rouge-score compute them (`pip install 'jtrain[eval]'`); every score comes with the signature that says
how. References are a text for each prediction, or several.
"""

from __future__ import annotations

import importlib
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jtrain.config.names import nearest
from jtrain.errors import ConfigError, DataError

References = Sequence[str] | Sequence[Sequence[str]]

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


class Scores(NamedTuple):
    """Scores by name, and how they were computed.

    Attributes:
      values: name -> number; BLEU, chrF and TER from 0 to 100 (TER may exceed it), the others from 0 to 1.
      signatures: name of the metric -> its signature.
    """

    values: dict[str, float]
    signatures: dict[str, str]


def score_texts(metrics: Sequence[str], predictions: Sequence[str], references: References) -> Scores:
    """Several metrics of the same texts.

    Args:
      metrics: names of `METRICS`.
      predictions: what was generated.
      references: of each prediction, a text or several.

    Raises:
      ConfigError: an unknown metric, or its package is not installed.
      DataError: no predictions, another number of references, or what is no text.
    """
    check_metrics(metrics)
    values: dict[str, float] = {}
    signatures: dict[str, str] = {}
    for name in dict.fromkeys(metrics):
        found = METRICS[name](predictions, references)
        values |= found.values
        signatures |= found.signatures
    return Scores(values, signatures)


def check_metrics(metrics: Sequence[str]) -> None:
    """Sees, before anything is computed, that these metrics exist and that their packages are installed.

    Raises:
      ConfigError: one does not, or is not; a text in place of a list of names.
    """
    if isinstance(metrics, str):
        raise ConfigError(f"metrics is the text {metrics!r:.60}", f"give a list of names: [{metrics!r:.60}]")
    for name in metrics:
        if name not in METRICS:
            meant = nearest(name, METRICS)
            known = f"They are: {', '.join(METRICS)}."
            raise ConfigError(f"{name!r} is no metric of texts", f"Did you mean {meant}? {known}" if meant else known)
        if name in _PACKAGES:
            needed(_PACKAGES[name], f"the metric {name}")


def bleu(predictions: Sequence[str], references: References, *, tokenize: str | None = None) -> Scores:
    """Corpus BLEU (Papineni et al. 2002), sacrebleu's: n-grams up to 4 of all texts together, times 100.

    Args:
      predictions, references: see `score_texts`.
      tokenize: sacrebleu's tokenizer: 13a, intl, zh, char, none, ...; None: zh where the references are mostly Chinese
        (13a takes a whole sentence without spaces for one word), else 13a.

    Raises:
      ConfigError: sacrebleu is not installed, or has no such tokenizer.
      DataError: see `score_texts`.
    """
    streams = _streams(predictions, references)
    name = tokenize or ("zh" if _mostly_chinese(streams) else "13a")
    try:
        metric = needed("sacrebleu.metrics", "BLEU").BLEU(tokenize=name)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"BLEU: {name!r} is no tokenizer of sacrebleu", "write 13a, intl, zh, char or none"
        ) from error
    return _corpus("bleu", metric, predictions, streams)


def chrf(predictions: Sequence[str], references: References) -> Scores:
    """chrF2 (Popović 2015), sacrebleu's: F-score of character n-grams up to 6, recall twice as heavy, times 100.

    Raises: see `bleu`.
    """
    return _corpus("chrf", needed("sacrebleu.metrics", "chrF").CHRF(), predictions, _streams(predictions, references))


def ter(predictions: Sequence[str], references: References) -> Scores:
    """Translation edit rate (Snover et al. 2006), sacrebleu's: edits a word of the reference, times 100; less is good.

    Raises: see `bleu`.
    """
    return _corpus("ter", needed("sacrebleu.metrics", "TER").TER(), predictions, _streams(predictions, references))


def rouge(predictions: Sequence[str], references: References, *, stemmer: bool = True) -> Scores:
    """ROUGE-1, -2, -L and -Lsum (Lin 2004), rouge-score's: mean F-score of the texts, each with its best reference.

    Words are found by `rouge_tokens`, not by rouge-score's own rule, which drops everything that is not ASCII. Lsum
    compares sentence by sentence: sentences are what newlines divide.

    Args:
      predictions, references: see `score_texts`.
      stemmer: English words of more than three letters are cut to their stems (Porter).

    Raises:
      ConfigError: rouge-score is not installed.
      DataError: see `score_texts`.
    """
    several = _several(predictions, references)
    scorer = needed("rouge_score.rouge_scorer", "ROUGE").RougeScorer(ROUGE_TYPES, tokenizer=_Words(stemmer))
    found = [scorer.score_multi(texts, prediction) for prediction, texts in zip(predictions, several, strict=True)]
    values = {name: float(np.mean([row[name].fmeasure for row in found])) for name in ROUGE_TYPES}
    version = _version("rouge-score")
    return Scores(
        values, {"rouge": f"fmeasure:mean|stemmer:{'yes' if stemmer else 'no'}|tok:unicode|version:{version}"}
    )


def exact_match(predictions: Sequence[str], references: References) -> Scores:
    """Share of predictions that equal one of their references, as `normalised` writes both.

    Raises:
      DataError: see `score_texts`.
    """
    several = _several(predictions, references)
    hits = [normalised(a) in map(normalised, texts) for a, texts in zip(predictions, several, strict=True)]
    return Scores({"exact_match": float(np.mean(hits))}, {"exact_match": "norm:nfc+spaces|case:mixed|punct:yes"})


METRICS: dict[str, Callable[[Sequence[str], References], Scores]] = {
    "bleu": bleu,
    "chrf": chrf,
    "ter": ter,
    "rouge": rouge,
    "exact_match": exact_match,
}
"""Name -> function of (predictions, references)."""

_PACKAGES = {
    "bleu": "sacrebleu.metrics",
    "chrf": "sacrebleu.metrics",
    "ter": "sacrebleu.metrics",
    "rouge": "rouge_score.rouge_scorer",
}


def normalised(text: str) -> str:
    """Unicode NFC, runs of white space as one space, none at the ends. Case and punctuation count."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def rouge_tokens(text: str, stem: Callable[[str], str] | None = None) -> list[str]:
    """Words of a text in any script, in lower case.

    Letters, digits and the marks on them make words; everything else divides them. In scripts that are written without
    spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) each letter is a word, with its marks. Of an ASCII text these
    are rouge-score's own words.

    Args:
      text: anything.
      stem: of ASCII words with more than three letters.
    """
    lowered = text.lower()
    words = _ASCII_WORD.findall(lowered) if text.isascii() else _words(unicodedata.normalize("NFC", lowered))
    return [stem(word) if stem and len(word) > 3 and word.isascii() else word for word in words]


_ASCII_WORD = re.compile("[a-z0-9]+")
# Thai, Lao, Burmese, Khmer; kana; ideographs, with their extensions.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff]"
)
_IDEOGRAPH = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_KANA = re.compile("[\u3040-\u30ff]")


def _words(text: str) -> list[str]:
    words: list[str] = []
    goes_on = behind_letter = False  # whether a letter, and whether a mark, belongs to the last word
    for character in text:
        kind = unicodedata.category(character)[0]
        if kind == "M" and behind_letter:
            words[-1] += character
        elif kind in "LN":
            alone = _UNSPACED.match(character) is not None
            if goes_on and not alone:
                words[-1] += character
            else:
                words.append(character)
            goes_on, behind_letter = not alone, True
        else:
            goes_on = behind_letter = False
    return words


class _Words:
    """`rouge_tokens` as rouge-score wants it."""

    def __init__(self, stemmer: bool):
        self._stem = None
        if stemmer:
            from nltk.stem.porter import PorterStemmer  # rouge-score brings it

            self._stem = PorterStemmer().stem

    def tokenize(self, text: str) -> list[str]:
        return rouge_tokens(text, self._stem)


def needed(module: str, what: str) -> Any:
    """A module of the extra `eval`.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(
            f"{what} needs {package}, which can't be imported: {error}", "pip install 'jtrain[eval]'"
        ) from error


def _corpus(name: str, metric: Any, predictions: Sequence[str], streams: list[list[str | None]]) -> Scores:
    score = metric.corpus_score([*predictions], streams).score
    return Scores({name: float(score)}, {name: str(metric.get_signature())})


def _streams(predictions: Sequence[str], references: References) -> list[list[str | None]]:
    """sacrebleu's form: the first references of all texts, the second ones, ...; None where there are fewer."""
    several = _several(predictions, references)
    most = max(map(len, several))
    return [[texts[n] if n < len(texts) else None for texts in several] for n in range(most)]


def _several(predictions: Sequence[str], references: References) -> list[list[str]]:
    """The references of each prediction."""
    for name, texts in (("predictions", predictions), ("references", references)):
        if isinstance(texts, str) or not (hasattr(texts, "__len__") and hasattr(texts, "__iter__")):
            raise DataError(f"{name} is {texts!r:.60}, not a list of texts", f"give [{texts!r:.60}]")
    if not len(predictions):
        raise DataError("there is no text to score", "give one prediction at least")
    if len(predictions) != len(references):
        raise DataError(
            f"{len(predictions)} predictions and {len(references)} references", "give each prediction its reference"
        )
    several: list[Any] = [
        [texts] if isinstance(texts, str) or not hasattr(texts, "__iter__") else [*texts] for texts in references
    ]
    for number, (prediction, texts) in enumerate(zip(predictions, several, strict=True)):
        if not texts or not all(isinstance(text, str) for text in (prediction, *texts)):
            raise DataError(
                f"text {number} or its reference is none: {prediction!r:.60}, {texts!r:.60}", "give texts (strings)"
            )
    return several


def _mostly_chinese(streams: list[list[str | None]]) -> bool:
    text = "".join(text for stream in streams for text in stream if text)
    letters = sum(character.isalpha() for character in text)
    return 2 * len(_IDEOGRAPH.findall(text)) > letters and not _KANA.search(text)


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)
