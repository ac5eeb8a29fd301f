"""Laws × entries: every promise of a base class, for every metric, matcher, detector and stitch that is registered.

The laws stand in the docstrings of the base classes, and the checks of hf-stitch-testing run them. Those of tasks,
which need networks, are in ``tasks/test_kit.py``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hf_stitch_testing import Part, check_detector, check_matcher, check_metric, check_stitch, check_task, conformance

from hf_stitch.detectors import Detector
from hf_stitch.matchers import Matcher
from hf_stitch.metrics import ActivationMetric
from hf_stitch.registry import registries
from hf_stitch.relative.projection import RelativeProjection
from hf_stitch.stitches import MaskedStitch, Stitch
from hf_stitch.tasks.base import Task

Options = dict[str, Any]
METRICS: dict[str, list[Options]] = {
    "linear_cka": [{}, {"debiased": True}],
    "minibatch_cka": [{}, {"batch_size": 8}],
    "cca": [{}, {"squared": True}, {"ridge": 0.1}],
    "pwcca": [{}, {"directions": "all"}],
    "procrustes": [{}, {"squared": True}, {"unit_norm": False}, {"squared": True, "unit_norm": False}],
    "linear_regression": [{}, {"center": False}],
    "shape_distance": [
        {}, {"alpha": 0.0}, {"alpha": 0.5}, {"distance": "euclidean"}, {"distance": "euclidean", "alpha": 0.0},
    ],
    "rsa": [{}, {"distance": "euclidean", "compare": "pearson"}, {"distance": "cosine"}],
    "mutual_knn": [{}, {"distance": "euclidean"}],
    "jaccard": [{}, {"distance": "euclidean"}],
    "relative_cosine": [{}, {"center": False}],
    "jensen_shannon": [{}, {"inputs": "probabilities"}],
    "correlation_matching": [{}, {"assignment": "soft"}],
    "soft_matching": [{}, {"compare": "distance"}],
    "rank_similarity": [{}, {"distance": "euclidean"}],
}  # fmt: skip
MATCHERS: dict[str, list[Options]] = {
    "lstsq": [{}, {"intercept": False, "rcond": 1e-9}],
    "ridge": [{}, {"ridge": 0}, {"ridge": 3.5}],
    "ridge_to_identity": [{}, {"ridge": 0.2}],
    "procrustes": [{}, {"center": False, "scale": True}],
    "low_rank": [{"rank": 4}],
    "low_rank_residual": [{"rank": 2}, {"rank": 2, "ridge": 3.5}],
    "lasso": [{"alpha": 0.1}],
    "permutation": [{}, {"compare": "distance"}, {"semi": True}],
    "random": [{"seed": 3}, {"rank": 4}],
    "recoloured": [{}, {"rcond": 1e-6}],
    "inverse_relative": [{}, {"center": False, "scale": False, "rcond": 1e-3}],
    "attention": [{}, {"ridge": 3.5, "heads": 2, "width": 8}],
    "piecewise": [{"clusters": 3}],
    "residual_mlp": [{"width": 16, "epochs": 8}],
    "retrieval": [{"epochs": 8}],
    "seeded_refinement": [{"iterations": 10}],
    "task_loss": [{"initial": {"name": "random", "rank": 3}, "labels": {"hard": 1.0}, "penalties": {"l1": 0.1}}],
    "unsupervised": [{"clusters": (12,), "starts": 4, "restarts": 100, "iterations": 10}],
}
DETECTORS: dict[str, list[Options]] = {
    "mahalanobis": [{}, {"tolerance": 0.1}],
    "knn": [{}, {"k": 3, "normalize": True}],
    "likelihood_ratio": [{}, {"tolerance": 0.1}],
    "classifier": [{}, {"hidden": 0, "epochs": 3}],
    "energy": [{"width": 4, "blocks": 1, "size": 8, "epochs": 3, "fine_tune_epochs": 3, "batch_size": 32}],
}
TABLES = {"metrics": METRICS, "matchers": MATCHERS, "detectors": DETECTORS}
READS_NETWORKS = "compares weights: check_weight_metric with networks that it reads, in the tests of its plugin"
ELSEWHERE = {
    **dict.fromkeys(("filter_atom_angle", "filter_atoms", "filter_gram", "grassmann", "patch_cosine"), READS_NETWORKS),
    **dict.fromkeys(("relative_change", "update_rank", "weight_cosine"), READS_NETWORKS),
}
"""Entries that are not here, and why."""


def drawn(stitch: Stitch) -> Stitch:
    """Give random values to weights that are 0 at first."""
    with torch.no_grad():
        for parameter in stitch.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    return stitch


def build(name: str, *widths: int, **options: Any) -> Stitch:
    return drawn(registries.stitches.get(name)(*widths, **options))


STITCHES: dict[str, list[Stitch]] = {
    "identity": [build("identity", 4, width) for width in (4, 6, 2)],
    "linear": [build("linear", 4, 6), build("linear", 6, 4, bias=False), build("linear", 4, 6, dtype=torch.float64)],
    "attention": [
        build("attention", 4, 6, heads=2, width=4),
        build("attention", 6, 4, heads=1, width=8, causal=True, dtype="float64"),
    ],
    "low_rank": [build("low_rank", 4, 6, rank=2), build("low_rank", 6, 4, rank=4, bias=False, dtype="float64")],
    "low_rank_residual": [
        build("low_rank_residual", 4, 6, rank=2),
        build("low_rank_residual", 6, 4, rank=4, dtype="float64"),
    ],
    "masked": [
        MaskedStitch.of(weight=torch.randn(6, 4), mask=torch.rand(6, 4) > 0.5, bias=torch.randn(6)),
        build("masked", 6, 4, bias=False, dtype="float64"),
    ],
    "piecewise": [build("piecewise", 4, 6, pieces=3), build("piecewise", 6, 4, pieces=1, dtype="float64")],
    "residual_mlp": [build("residual_mlp", 4, 6, hidden=5), build("residual_mlp", 6, 4, hidden=3, dtype="float64")],
    "relative": [RelativeProjection.of(torch.randn(5, 4))],
}


def parts() -> Iterator[Part]:
    """Generate the laws of all entries, before any of these is built or computed."""
    for kind, check in (("metrics", check_metric), ("matchers", check_matcher)):
        for name in registries[kind]:
            for options in TABLES[kind].get(name, [{}]) if name not in ELSEWHERE else ():
                yield from check.parts(name, **options)
    for name in registries.detectors:
        for options in DETECTORS.get(name, [{}]):
            yield from check_detector.parts(registries.detectors.build(name, **options))
    for stitch in (stitch for name in registries.stitches for stitch in STITCHES[name]):
        yield from check_stitch.parts(stitch)


@pytest.mark.parametrize("law", [*parts()], ids=str)
def test_holds(law: Part) -> None:
    law()


@pytest.mark.parametrize(
    ("base", "check", "entry"),
    [
        (ActivationMetric, check_metric, "cca"), (Matcher, check_matcher, "ridge"), (Stitch, check_stitch, None),
        (Detector, check_detector, None), (Task, check_task, None),
    ],
)  # fmt: skip
def test_each_law_of_a_docstring_is_a_part_of_a_check(base: type, check: conformance[...], entry: Any) -> None:
    laws = (inspect.getdoc(base) or "").partition("\n``hf_stitch_testing.")[2]
    names = re.findall(r"``(\w+)``", " ".join(re.findall(r"^- (``.+?``): ", laws, re.MULTILINE)))
    given = (entry, None, None) if check is check_task else (entry,)
    assert len(names) > 4 and laws.startswith(check.__name__)
    assert {*names} <= {part.name for part in check.parts(*given)}
