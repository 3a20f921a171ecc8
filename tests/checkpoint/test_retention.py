import pytest

from jtrain.checkpoint.retention import best_steps, surplus_steps


def test_best_is_by_value_then_by_age_and_ignores_what_is_not_finite():
    metrics = {10: 2.0, 20: 1.0, 30: 1.0, 40: None, 50: float("nan"), 60: float("-inf")}
    assert best_steps(metrics, 2, "min") == [20, 30]
    assert best_steps(metrics, 2, "max") == [10, 20]


@pytest.mark.parametrize(
    ("best_at", "limit", "kept"),
    [  # steps 1..5, by hand: the newest and the best always stay, the rest of the limit goes to the newest others
        (1, 1, {1, 5}),
        (3, 1, {3, 5}),
        (5, 1, {5}),
        (1, 2, {1, 5}),
        (3, 2, {3, 5}),
        (5, 2, {4, 5}),
        (1, 3, {1, 4, 5}),
        (5, 3, {3, 4, 5}),
        (2, None, {1, 2, 3, 4, 5}),
    ],
)
def test_the_newest_and_the_best_survive_every_limit(best_at, limit, kept):
    metrics = {step: float(step != best_at) for step in range(1, 6)}
    assert set(metrics) - set(surplus_steps(metrics, limit, 1, "min")) == kept


def test_several_best_are_kept_beyond_the_limit():
    metrics = {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.9}
    assert surplus_steps(metrics, 1, 2, "min") == [3]


def test_without_a_metric_only_the_newest_count():
    assert surplus_steps(dict.fromkeys(range(5), None), 2, 1, "min") == [0, 1, 2]
    assert surplus_steps({}, 1, 1, "min") == []
