"""Metrics of neighbours and the difference of accuracies, against other code, and what they refuse."""

from __future__ import annotations

from typing import Any

import hf_stitch_studies as studies
import numpy as np
import pytest
from scipy.spatial.distance import cosine
from sklearn.neighbors import NearestNeighbors

from hf_stitch.analysis import bootstrap
from hf_stitch.registry import registries

METRICS: list[tuple[str, dict[str, Any]]] = [
    ("rank_similarity", {}), ("rank_similarity", {"distance": "euclidean"}), ("second_order_cosine", {}),
]  # fmt: skip
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((80, 6))
Y = np.tanh(X) @ RANDOM.standard_normal((6, 5)) + 0.3 * RANDOM.standard_normal((80, 5))


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_ranks_of_the_neighbours_of_sklearn(distance: str) -> None:
    k, alike = 7, []
    near = [NearestNeighbors(n_neighbors=k, metric=distance).fit(s).kneighbors(return_distance=False) for s in (X, Y)]
    for a, b in zip(*near, strict=True):
        both = set(a) & set(b)
        ranks = [(list(a).index(j) + 1, list(b).index(j) + 1) for j in both]
        most = sum(1 / m for m in range(1, len(both) + 1))
        alike.append(sum(2 / ((1 + abs(r - s)) * (r + s)) for r, s in ranks) / most if both else 0)
    assert studies.rank_similarity(X, Y, k=k, distance=distance) == pytest.approx(np.mean(alike))  # type: ignore[arg-type]


def test_distances_of_scipy() -> None:
    k, cosines = 4, []
    near = [NearestNeighbors(n_neighbors=k, metric="cosine").fit(s).kneighbors(return_distance=False) for s in (X, Y)]
    for i in range(len(X)):
        union = sorted({*near[0][i], *near[1][i]})
        cosines.append(1 - cosine(*([cosine(s[i], s[j]) for j in union] for s in (X, Y))))
    assert studies.second_order_cosine(X, Y, k=k) == pytest.approx(np.mean(cosines))


def test_neighbours_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [getattr(studies, name)(X, Y) for name in ("rank_similarity", "second_order_cosine")]
    monkeypatch.setattr("hf_stitch.metrics._neighbours._QUERIES", 7)
    found = [getattr(studies, name)(X, Y) for name in ("rank_similarity", "second_order_cosine")]
    assert found == pytest.approx(whole)


@pytest.mark.parametrize("name", ["rank_similarity", "second_order_cosine"])
def test_what_has_no_neighbours_is_refused(name: str) -> None:
    metric, x = registries.metrics.get(name).function, X.copy()
    x[7] = 0
    with pytest.raises(ValueError, match=f"{name}: row 7 of x is zero"):
        metric(x, Y)
    with pytest.raises(ValueError, match=rf"{name}: k must be below the number of rows, got k=10 and 10 rows"):
        metric(X[:10], Y[:10])
    with pytest.raises(ValueError, match=f"{name}: all 80 rows of x are equal"):
        metric(np.ones((80, 5)), Y)
    collapsed = X[[0, 1, 2, 3] * 20]
    with pytest.raises(ValueError, match=f"{name}: several rows of x are equally near to row 0, so its 10 nearest"):
        metric(collapsed, Y)
    if name == "second_order_cosine":
        with pytest.raises(ValueError, match="row 0 has the same direction as all its neighbours"):
            metric(collapsed, collapsed, k=19)


# -- accuracies --------------------------------------------------------------------------------------------------------
def test_accuracies_are_compared_by_the_greatest_outputs() -> None:
    x, y, labels = X[:, :5], Y, np.arange(80) % 5
    right_x, right_y = (side.argmax(1) == labels for side in (x, y))
    expected = pytest.approx(abs(right_x.mean() - right_y.mean()))
    assert studies.accuracy_difference(x, y, labels=labels) == studies.accuracy_difference(y, x, labels=labels)
    assert studies.accuracy_difference(x, y, labels=labels) == expected


def test_labels_are_resampled_with_their_rows() -> None:
    g = np.random.default_rng(0)
    labels = g.integers(0, 3, 200)
    right = np.eye(3)[labels]
    wrong = np.eye(3)[(labels + (np.arange(200) % 4 == 0)) % 3]
    interval = studies.bootstrap_accuracy_difference(right, wrong, labels=labels)
    assert interval.value == pytest.approx(0.25)
    assert interval.standard_error == pytest.approx(np.sqrt(0.25 * 0.75 / 200), rel=0.2)
    assert interval.metric == "AccuracyDifference()"
    again = studies.bootstrap_accuracy_difference(right, wrong, labels=labels, samples=np.arange(200) // 2, seed=1)
    assert (again.samples, again.rows, again.value) == (100, 200, interval.value)


def test_a_registered_metric_takes_no_labels() -> None:
    assert "accuracy_difference" not in registries.metrics
    with pytest.raises(TypeError, match="linear_cka got an unexpected option 'labels'"):
        bootstrap("linear_cka", X, Y, labels=np.zeros(80))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0, 1, 2, 3, 5]), "the label of row 4 must be from 0 to 4, got 5"),
        (np.array([0, -1, 2, 3, 4]), "the label of row 1 must be from 0 to 4, got -1"),
        (np.arange(4), "labels must be 5 integers"),
        (np.arange(5.0), "labels must be 5 integers, got torch.float64"),
    ],
)
def test_wrong_labels_are_refused(labels: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        studies.accuracy_difference(np.eye(5), np.eye(5), labels=labels)
    with pytest.raises(ValueError, match=message):
        studies.bootstrap_accuracy_difference(np.eye(5), np.eye(5), labels=labels)
