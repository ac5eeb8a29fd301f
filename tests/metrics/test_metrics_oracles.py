"""The values that independent implementations give, dense and streamed.

They come from the metrics' own authors (sim_metric, google/svcca, ReSi, netrep) and, for debiased CKA, RBF CKA and R²,
from the definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hf_stitch_studies import SecondOrderCosine
from metric_rows import ORACLES, case

from hf_stitch.metrics._cca import CCA, PWCCA, SVCCA, _leading
from hf_stitch.metrics._cka import RBFCKA, LinearCKA
from hf_stitch.metrics._matching import CorrelationMatching
from hf_stitch.metrics._neighbours import Jaccard
from hf_stitch.metrics._procrustes import Procrustes
from hf_stitch.metrics._regression import LinearRegression
from hf_stitch.metrics._rsa import RSA, DistanceCorrelation
from hf_stitch.metrics._shape import ShapeDistance
from hf_stitch.metrics.base import Metric


class Oracle(NamedTuple):
    """A metric and how the oracle fed it."""

    metric: Callable[[], Metric]
    rows: int | None = None
    exchanged: bool = False
    tolerance: float = 1e-6


METRIC_OF = {
    "cca_mean": Oracle(CCA),
    "cca_mean_squared": Oracle(lambda: CCA(squared=True)),
    "pwcca_xy": Oracle(PWCCA),
    "pwcca_yx": Oracle(PWCCA, exchanged=True),
    "svcca_99_mean": Oracle(SVCCA),
    "linear_cka": Oracle(LinearCKA),
    "linear_cka_debiased": Oracle(lambda: LinearCKA(debiased=True)),
    "rbf_cka_half_median_first800": Oracle(RBFCKA, rows=800),
    "procrustes_sq_raw_centered": Oracle(lambda: Procrustes(squared=True, unit_norm=False)),
    "opd_unit_norm": Oracle(lambda: Procrustes(squared=True)),
    "r2_lr_uncentred": Oracle(lambda: LinearRegression(center=False)),
    "r2_lr_centred": Oracle(LinearRegression),
    "knn_jaccard_k10_cosine": Oracle(Jaccard, tolerance=1e-3),
    "second_order_cosine_k10": Oracle(SecondOrderCosine, tolerance=1e-3),
    "rsa_spearman_corr": Oracle(RSA),
    "distance_correlation": Oracle(DistanceCorrelation, rows=600),
    "correlation_matching_hard": Oracle(CorrelationMatching),
    "correlation_matching_soft": Oracle(lambda: CorrelationMatching(assignment="soft")),
    "shape_angular_alpha1": Oracle(ShapeDistance),
    "shape_angular_alpha05": Oracle(lambda: ShapeDistance(alpha=0.5)),
    "shape_angular_alpha0": Oracle(lambda: ShapeDistance(alpha=0)),
    "shape_euclid_alpha1": Oracle(lambda: ShapeDistance(distance="euclidean")),
}
# Not the value of a metric, but how many components SVCCA keeps.
DIMENSIONS = "svcca_99_dims"

VALUES = [
    (name, key, value)
    for name, oracle in ORACLES.items()
    for key, value in oracle["values"].items()
    if value is not None and key != DIMENSIONS
]


@pytest.mark.parametrize(("name", "key", "value"), VALUES)
def test_dense_and_streamed(name: str, key: str, value: float) -> None:
    oracle = METRIC_OF[key]
    x, y = (side[: oracle.rows] for side in case(**ORACLES[name]["recipe"]))
    if oracle.exchanged:
        x, y = y, x
    metric = oracle.metric()
    dense = metric.function(x, y, **metric.options)
    assert dense == pytest.approx(value, rel=oracle.tolerance)
    for start in range(0, len(x), 7):
        metric.update(x[start : start + 7], y[start : start + 7])
    assert metric.compute() == pytest.approx(dense, rel=1e-8)


@pytest.mark.parametrize("name", ORACLES)
def test_svcca_keeps_as_many_components(name: str) -> None:
    sides = case(**ORACLES[name]["recipe"])
    scatters = [torch.from_numpy(np.cov(side.T)) for side in sides]
    assert [len(_leading(scatter, 0.99)[0]) for scatter in scatters] == ORACLES[name]["values"][DIMENSIONS]


def test_every_oracle_is_tested() -> None:
    keys = {key for oracle in ORACLES.values() for key in oracle["values"]}
    assert keys == {*METRIC_OF, DIMENSIONS}
