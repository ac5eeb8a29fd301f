from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import confusion_matrix

from hf_stitch.analysis import identify_layers

NAMES = "pqrs"


def pairs_of(right: dict[tuple[str, str], bool]) -> dict[tuple[str, str], np.ndarray]:
    """Similarities for each pair that identify all three layers or none."""
    return {pair: np.eye(3) if all_right else np.roll(np.eye(3), 1, 0) for pair, all_right in right.items()}


def test_axes_are_rows_and_columns() -> None:
    values = np.array([[0.9, 0.2, 0.1], [0.8, 0.7, 0.1], [0.1, 0.3, 0.2]])
    found = identify_layers(values, higher_is_better=True, layers=["l", "m", "n"])
    assert found.hits["a"].tolist() == [[True, False, False]]
    assert found.hits["b"].tolist() == [[True, True, True]]
    assert (found["a"].value, found["b"].value, found.chance) == (pytest.approx(1 / 3), 1.0, pytest.approx(1 / 3))
    reverse = identify_layers(1 - values, higher_is_better=False)
    assert all((reverse.hits[axis] == found.hits[axis]).all() for axis in found.hits)


def test_equal_values_are_ties_and_ties_are_not_accurate() -> None:
    found = identify_layers(np.ones((4, 4)), higher_is_better=True)
    assert found["a"].value == found["b"].value == 0
    assert (found.verdicts("a") == "tie").all() and not found.tested
    np.testing.assert_allclose(found.winners["b"], 0.25)
    assert identify_layers(np.ones((4, 4)) + 1e-9 * np.eye(4), higher_is_better=True)["a"].value == 1


def test_a_layer_that_the_samples_do_not_tell_from_the_best_is_a_tie() -> None:
    values = np.array([[0.9, 0.2, 0.1], [0.8, 0.7, 0.1], [0.5, 0.3, 0.2]])
    as_good = np.zeros((2, 3, 3), bool)
    as_good[0, 1] = True, True, False  # the second layer of a cannot be told from the first, the third can
    as_good[1, 2] = True, True, True  # along the other axis all are hits whatever this says
    found = identify_layers(values, higher_is_better=True, as_good=as_good)
    assert found.verdicts("a").tolist() == [["hit", "tie", "miss"]] and found.tested
    assert found.verdicts("b").tolist() == [["hit", "hit", "hit"]]
    assert found["a"].value == pytest.approx(1 / 3)
    assert found.winners["a"].tolist() == [[1, 0, 0]] * 3 and found.favourite("a") == ("0", 1.0)
    assert (found.winners["b"] == np.eye(3)).all()
    assert "0, always" in str(found)
    by_pair = identify_layers({("p", "q"): values}, higher_is_better=True, as_good={("p", "q"): as_good})
    assert by_pair.ties["a"].tolist() == found.ties["a"].tolist()


@pytest.mark.parametrize("count", [2, 8])
def test_one_layer_that_always_wins_is_exactly_at_chance(count: int) -> None:
    g = np.random.default_rng(0)
    values = {pair: g.random((count, count)) for pair in itertools.combinations(NAMES, 2)}
    for square in values.values():
        square[:, 1] = 2
    found = identify_layers(values, higher_is_better=True)
    assert found["a"].value == found.chance == 1 / count
    assert found.favourite("a") == ("1", 1.0)
    assert found.winners["a"][:, 1].tolist() == [6] * count and found.winners["a"].sum() == 6 * count
    assert found.favourite("b")[1] < 1


def test_undefined_candidates_are_left_out() -> None:
    values = np.array([[0.9, np.nan, 0.1], [0.8, np.nan, 0.1], [0.5, np.nan, 0.6]])
    values[1, 2] = np.nan
    found = identify_layers(values, higher_is_better=True)
    assert found.verdicts("a").tolist() == [["hit", "undefined", "hit"]]
    assert found.verdicts("b").tolist() == [["hit", "undefined", "hit"]]
    assert found["a"].value == 1 and found.candidates["a"].tolist() == [[2, 0, 2]]
    assert found.candidates["b"].tolist() == [[3, 0, 2]]
    assert found.chance == pytest.approx((1 / 2 + 1 / 2 + 1 / 3 + 1 / 2) / 4)
    assert not found.winners["a"][1].any() and "undefined" in str(found)
    assert [text.get_text() for text in found.plot().axes[0].texts][3:6] == ["–"] * 3
    nothing = identify_layers([[np.nan, 0.5], [0.5, np.nan]], higher_is_better=False)
    assert np.isnan(nothing["a"].value) and np.isnan(nothing.chance)
    assert "–" in str(nothing)


def test_accuracy_is_over_the_layers_that_are_judged() -> None:
    """A pair in which nothing is judged has no weight; another with one layer has little."""
    one = np.full((3, 3), np.nan)
    one[0, 0], one[0, 1] = 0.1, 0.2
    none = np.full((3, 3), np.nan)
    none[0, 1] = 0.5
    found = identify_layers({("p", "q"): np.eye(3), ("p", "r"): one, ("q", "r"): none}, higher_is_better=True)
    assert found["a"].value == 3 / 4


def test_the_confusion_is_that_of_scikit_learn() -> None:
    g = np.random.default_rng(0)
    values = {pair: g.random((5, 5)) for pair in itertools.combinations(NAMES, 2)}
    found = identify_layers(values, higher_is_better=False)
    for axis, which in (("a", 1), ("b", 0)):
        chosen = np.concatenate([square.argmin(which) for square in values.values()])
        expected = confusion_matrix(np.tile(np.arange(5), len(values)), chosen)
        np.testing.assert_array_equal(found.winners[axis], expected)  # type: ignore[index]
    shown = [float(text.get_text()) for text in found.plot().axes[0].texts]
    np.testing.assert_allclose(np.reshape(shown, (5, 5)), found.winners["a"] / 6, atol=0.006)


def test_guessing_is_at_chance() -> None:
    g = np.random.default_rng(0)
    values = {pair: g.random((8, 8)) for pair in itertools.combinations([f"net{i}" for i in range(12)], 2)}
    found = identify_layers(values, higher_is_better=True)
    for axis in ("a", "b"):
        assert found[axis].low < found.chance == 1 / 8 < found[axis].high
        assert found[axis].high - found[axis].low < 0.15


def test_the_interval_is_wilsons_if_all_pairs_agree() -> None:
    found = identify_layers(pairs_of(dict.fromkeys(itertools.combinations(NAMES, 2), True)), higher_is_better=True)
    wilson = stats.binomtest(18, 18).proportion_ci(0.95, method="wilson")
    assert (found["a"].low, found["a"].high) == (pytest.approx(wilson.low), pytest.approx(1))


def test_pairs_that_share_a_network_are_not_independent() -> None:
    """One network of ten differs from the others, so that nine of 45 pairs fail together."""
    values = pairs_of({(a, b): a != "net0" for a, b in itertools.combinations([f"net{i}" for i in range(10)], 2)})
    found = identify_layers(values, higher_is_better=True)["a"]
    wilson = stats.binomtest(36 * 3, 45 * 3).proportion_ci(0.95, method="wilson")
    # The Dirichlet weight of net0 among ten networks has the distribution Beta(1, 9), which determines the interval.
    heavy = stats.beta(1, 9).ppf(0.975)
    assert found.low < 1 - 2 * heavy * (1 - heavy) + 0.02 < wilson.low
    assert found.high > wilson.high


def test_pairs_of_a_network_with_itself_are_not_mixed_with_others() -> None:
    found = identify_layers(pairs_of({(name, name): name != "p" for name in NAMES}), higher_is_better=True)["a"]
    assert found.value == 0.75
    assert found.low < 0.5


def test_results_convert_to_records_and_tables() -> None:
    values = pairs_of({("p", "q"): True, ("p", "r"): False})
    found = identify_layers(values, higher_is_better=True, layers=["l", "m", "n"])
    table = found.to_pandas()
    assert len(table) == 2 * 2 * 3 and set(table["verdict"]) == {"hit", "miss"}
    assert table.groupby(["axis", "b"])["hit"].mean().to_dict() == {
        ("a", "q"): 1, ("a", "r"): 0, ("b", "q"): 1, ("b", "r"): 0
    }  # fmt: skip
    record = json.loads(json.dumps(found.to_dict()))
    assert record["pairs"] == [["p", "q"], ["p", "r"]]
    assert record["scores"]["a"]["value"] == 0.5
    assert record["hits"]["b"] == [[True] * 3, [False] * 3]
    for text in ("layers of a among layers of b", f"{found['a']}", "3 of 6"):
        assert text in str(found)


PAIR = ("p", "q")
REFUSALS: list[tuple[Any, dict[str, Any], str]] = [
    ({}, {}, "at least one pair"),
    (np.ones((2, 3)), {}, r"must be \(L, L\).*got \(2, 3\)"),
    (np.ones((1, 1)), {}, "L >= 2"),
    ({PAIR: np.eye(2), ("p", "r"): np.eye(3)}, {}, r"\('p', 'r'\).*got \(3, 3\)"),
    ({PAIR: np.eye(2), ("p", "p"): np.eye(2)}, {}, "one network with itself and pairs of two"),
    (np.full((2, 2), np.nan), {}, r"values of \('a', 'b'\) are all NaN"),
    (np.eye(2), {"as_good": np.eye(2)}, r"must be bool of the shape \(2, 2, 2\), got float64 of the shape \(2, 2\)"),
    (np.eye(2), {"as_good": {PAIR: np.ones((2, 2, 2), bool)}}, "as_good must have the same pairs as values"),
    (np.eye(2), {"layers": ["l"]}, "must name the 2 layers, got 1"),
    (np.eye(2), {"confidence": 0.0}, "confidence must be a number > 0 and < 1"),
]


@pytest.mark.parametrize(("values", "options", "message"), REFUSALS)
def test_bad_input_is_rejected(values: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        identify_layers(values, higher_is_better=True, **options)
