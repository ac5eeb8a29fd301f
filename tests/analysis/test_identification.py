from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from hf_stitch.analysis import Identification, identify_layers

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


def test_ties_are_misses() -> None:
    found = identify_layers(np.ones((4, 4)), higher_is_better=True)
    assert found["a"].value == found["b"].value == 0
    almost = np.ones((4, 4)) + 1e-9 * np.eye(4)
    assert identify_layers(almost, higher_is_better=True)["a"].value == 1


def test_guessing_is_at_chance() -> None:
    g = np.random.default_rng(0)
    networks = [f"net{i}" for i in range(12)]
    values = {pair: g.random((8, 8)) for pair in itertools.combinations(networks, 2)}
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
    networks = [f"net{i}" for i in range(10)]
    values = pairs_of({(a, b): a != "net0" for a, b in itertools.combinations(networks, 2)})
    found = identify_layers(values, higher_is_better=True)["a"]
    wilson = stats.binomtest(36 * 3, 45 * 3).proportion_ci(0.95, method="wilson")
    # The Dirichlet weight of net0 among ten networks has the distribution Beta(1, 9), which determines the interval.
    heavy = stats.beta(1, 9).ppf(0.975)
    assert found.low < 1 - 2 * heavy * (1 - heavy) + 0.02 < wilson.low
    assert found.high > wilson.high


def test_pairs_of_a_network_with_itself_are_not_mixed_with_others() -> None:
    intra = pairs_of({(name, name): name != "p" for name in NAMES})
    found = identify_layers(intra, higher_is_better=True)["a"]
    assert found.value == 0.75
    assert found.low < 0.5
    with pytest.raises(ValueError, match="a network with itself cannot be mixed"):
        identify_layers({**intra, ("p", "q"): np.eye(3)}, higher_is_better=True)


def test_results_convert_to_records_and_tables() -> None:
    values = pairs_of({("p", "q"): True, ("p", "r"): False})
    found = identify_layers(values, higher_is_better=True, layers=["l", "m", "n"])
    table = found.to_pandas()
    assert len(table) == 2 * 2 * 3
    assert table.groupby(["axis", "b"])["hit"].mean().to_dict() == {
        ("a", "q"): 1, ("a", "r"): 0, ("b", "q"): 1, ("b", "r"): 0
    }  # fmt: skip
    record = json.loads(json.dumps(found.to_dict()))
    assert record["pairs"] == [["p", "q"], ["p", "r"]]
    assert record["scores"]["a"]["value"] == 0.5
    assert record["hits"]["b"] == [[True] * 3, [False] * 3]
    again = Identification.from_dict(record)
    assert again.to_dict() == found.to_dict() and again.to_pandas().equals(table)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(found)
    assert "layers of a among those of b" in captured.get()
    assert f"{found['a']}" in captured.get()
    assert "3 of 6" in captured.get()


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ({}, {}, "no pairs"),
        (np.ones((2, 3)), {}, r"must be \(L, L\).*got \(2, 3\)"),
        (np.ones((1, 1)), {}, "L >= 2"),
        ({("p", "q"): np.eye(2), ("p", "r"): np.eye(3)}, {}, r"\('p', 'r'\).*got \(3, 3\)"),
        ([[np.nan, 0.0], [0.0, 1.0]], {}, "contain NaN"),
        (np.eye(2), {"layers": ["l"]}, "must name the 2 layers, got 1"),
        (np.eye(2), {"confidence": 0.0}, "confidence must be between 0 and 1"),
    ],
)
def test_bad_input_is_rejected(values: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        identify_layers(values, higher_is_better=True, **options)
