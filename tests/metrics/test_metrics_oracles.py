"""The values that independent implementations give, dense and streamed.

They come from the metrics' own authors (sim_metric, google/svcca, ReSi, netrep) and, for debiased CKA, RBF CKA and R²,
from the definitions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from metric_rows import ORACLES, case

from hf_stitch.metrics._cca import _leading
from hf_stitch.metrics._rows import RowMoments
from hf_stitch.registry import registries


class Oracle(NamedTuple):
    """A metric and how the oracle fed it."""

    name: str
    options: dict[str, Any] = {}  # noqa: RUF012
    rows: int | None = None
    exchanged: bool = False
    tolerance: float = 1e-6


METRIC_OF = {
    "cca_mean": Oracle("cca"),
    "cca_mean_squared": Oracle("cca", {"squared": True}),
    "pwcca_xy": Oracle("pwcca"),
    "pwcca_yx": Oracle("pwcca", exchanged=True),
    "svcca_99_mean": Oracle("svcca"),
    "linear_cka": Oracle("linear_cka"),
    "linear_cka_debiased": Oracle("linear_cka", {"debiased": True}),
    "rbf_cka_half_median_first800": Oracle("rbf_cka", rows=800),
    "procrustes_sq_raw_centered": Oracle("procrustes", {"squared": True, "unit_norm": False}),
    "opd_unit_norm": Oracle("procrustes", {"squared": True}),
    "r2_lr_uncentred": Oracle("linear_regression", {"center": False}),
    "r2_lr_centred": Oracle("linear_regression"),
    "knn_jaccard_k10_cosine": Oracle("jaccard", tolerance=1e-3),
    "second_order_cosine_k10": Oracle("second_order_cosine", tolerance=1e-3),
    "rsa_spearman_corr": Oracle("rsa"),
    "shape_angular_alpha1": Oracle("shape_distance"),
    "shape_angular_alpha05": Oracle("shape_distance", {"alpha": 0.5}),
    "shape_angular_alpha0": Oracle("shape_distance", {"alpha": 0.0}),
    "shape_euclid_alpha1": Oracle("shape_distance", {"distance": "euclidean"}),
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
    metric = registries.metrics.build(oracle.name, **oracle.options)
    dense = metric.function(x, y, **metric.options)
    assert dense == pytest.approx(value, rel=oracle.tolerance)
    for start in range(0, len(x), 7):
        metric.update(x[start : start + 7], y[start : start + 7])
    assert metric.compute() == pytest.approx(dense, rel=1e-8)


@pytest.mark.parametrize("name", ORACLES)
def test_svcca_keeps_as_many_components(name: str) -> None:
    moments = RowMoments(*(torch.from_numpy(side) for side in case(**ORACLES[name]["recipe"])))
    assert [len(_leading(moments, side, 0.99)[0]) for side in ("x", "y")] == ORACLES[name]["values"][DIMENSIONS]


def test_every_oracle_is_tested() -> None:
    assert {key for oracle in ORACLES.values() for key in oracle["values"]} == {*METRIC_OF, DIMENSIONS}
