"""Scores of texts: the figures of sacrebleu 2.6.0 and rouge-score 0.1.2, and scripts that their defaults drop."""

import sys

import pytest

from jtrain.errors import ConfigError, DataError
from jtrain.tasks.text_scores import (
    METRICS,
    bleu,
    chrf,
    exact_match,
    normalised,
    rouge,
    rouge_tokens,
    score_texts,
    ter,
)

PREDICTED = ["The cat sat on the mat.", "There is a quick brown fox jumping over the dog."]
TRUE = ["The cat is sitting on the mat.", "The quick brown fox jumps over the lazy dog."]
CHINESE = ["猫坐在垫子上。", "敏捷的棕色狐狸跳过了懒狗。"]


@pytest.mark.parametrize(
    ("tokenize", "score"), ((None, 28.3376), ("13a", 28.3376), ("char", 65.3188), ("none", 22.2602))
)
def test_bleu_is_sacrebleus_and_its_signature_says_how(tokenize, score):
    found = bleu(PREDICTED, TRUE, tokenize=tokenize)
    assert found.values["bleu"] == pytest.approx(score, abs=5e-5)
    expected = f"nrefs:1|case:mixed|eff:no|tok:{tokenize or '13a'}|smooth:exp|version:"
    assert found.signatures["bleu"].startswith(expected)


def test_bleu_is_of_the_corpus_and_no_mean_of_sentences():
    assert bleu(PREDICTED, TRUE).values["bleu"] < 31.4441 - 3  # the mean of 42.3837 and 20.5046


def test_chrf_and_ter_are_sacrebleus():
    assert chrf(PREDICTED, TRUE).values["chrf"] == pytest.approx(58.4795, abs=5e-5)
    assert ter(PREDICTED, TRUE).values["ter"] == pytest.approx(43.75)


@pytest.mark.parametrize(
    ("pair", "scores"), ((0, (0.7692, 0.5455, 0.7692, 0.7692)), (1, (0.7368, 0.5882, 0.7368, 0.7368)))
)
def test_rouge_of_english_is_rouge_scores_own(pair, scores):
    found = rouge([PREDICTED[pair]], [TRUE[pair]]).values
    assert [found[name] for name in ("rouge1", "rouge2", "rougeL", "rougeLsum")] == pytest.approx(scores, abs=5e-5)


def test_lsum_compares_the_sentences_that_newlines_divide():
    a, b = "The dog barked.\nThe cat sat.", "The cat sat.\nThe dog barked."
    lines = rouge([a], [b]).values
    assert (lines["rougeL"], lines["rougeLsum"]) == (0.5, 1.0)
    assert rouge([a.replace("\n", " ")], [b.replace("\n", " ")]).values["rougeLsum"] == 0.5


@pytest.mark.parametrize(
    "texts",
    (CHINESE, ["Кошка сидит на коврике."], ["बिल्ली चटाई पर बैठी है"], ["แมวนั่งบนเสื่อ"], ["고양이가 매트 위에 앉았다"]),
)
def test_equal_texts_of_any_script_have_the_full_score(texts):
    found = score_texts(list(METRICS), texts, texts).values
    for name in ("rouge1", "rouge2", "rougeL", "rougeLsum", "exact_match"):
        assert found[name] == pytest.approx(1.0), name
    assert found["chrf"] == pytest.approx(100.0)


def test_chinese_goes_through_sacrebleus_chinese_tokenizer():
    found = bleu(CHINESE, CHINESE)
    assert found.values["bleu"] == pytest.approx(100.0) and "|tok:zh|" in found.signatures["bleu"]
    assert bleu(CHINESE[:1], CHINESE[:1], tokenize="13a").values["bleu"] == 0.0
    assert "|tok:13a|" in bleu(["a 猫 of cats and dogs"], ["a 猫"]).signatures["bleu"]


def test_words_in_any_script():
    assert rouge_tokens("Don't stop, 3.5 x_y!") == ["don", "t", "stop", "3", "5", "x", "y"]  # rouge-score's own
    assert rouge_tokens("Café naïve") == rouge_tokens("Cafe\u0301 nai\u0308ve") == ["café", "naïve"]
    assert rouge_tokens("GPT-4 是模型") == ["gpt", "4", "是", "模", "型"]
    assert rouge_tokens("हिन्दी में") == ["हिन्दी", "में"]
    assert rouge_tokens("running cafés", str.upper) == ["RUNNING", "cafés"]


def test_words_of_ascii_are_rouge_scores_own():
    from nltk.stem.porter import PorterStemmer
    from rouge_score.tokenize import tokenize

    text = "It's the Jumping-fox's 2nd ponies (and dying mice), running_fast; etc."
    stemmer = PorterStemmer()
    assert rouge_tokens(text, stemmer.stem) == tokenize(text, stemmer)


def test_the_best_of_several_references_counts():
    several = [["something else entirely", TRUE[0]], [TRUE[1]]]
    found = score_texts(["rouge", "exact_match", "bleu"], [TRUE[0], TRUE[1]], several)
    assert found.values["rougeL"] == found.values["exact_match"] == pytest.approx(1.0)
    assert found.values["bleu"] == pytest.approx(100.0) and "nrefs:var" in found.signatures["bleu"]


def test_an_exact_match_does_not_mind_white_space_and_composition_but_case():
    assert normalised(" Cafe\u0301\n is  open ") == "Café is open"
    assert exact_match([" 42\n", "cafe\u0301", "No"], ["42", "café", "no"]).values["exact_match"] == pytest.approx(
        2 / 3
    )


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    (
        ([], [], "no text to score"),
        (["a"], ["a", "b"], "1 predictions and 2"),
        (["a"], [[]], "text 0"),
        ([None], ["a"], "text 0"),
        ([1], [2], "text 0 or its reference is none: 1"),
        ("abc", "abc", "predictions is 'abc', not a list of texts"),
        (["abc"], "abc", "references is 'abc', not a list of texts"),
    ),
)
def test_texts_that_do_not_fit_are_refused(predictions, references, message):
    with pytest.raises(DataError, match=message):
        score_texts(["exact_match"], predictions, references)


def test_unknown_metrics_and_packages_that_are_missing_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="Did you mean bleu"):
        score_texts(["blue"], ["a"], ["a"])
    with pytest.raises(ConfigError, match=r"give a list of names: \['bleu'\]"):
        score_texts("bleu", ["a"], ["a"])
    with pytest.raises(ConfigError, match="no tokenizer of sacrebleu"):
        bleu(["a"], ["a"], tokenize="words")
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(ConfigError, match=r"pip install 'jtrain\[eval\]'"):
        score_texts(["chrf"], ["a"], ["a"])
