"""Descriptions of the built-in metrics with their default options, to list them without importing the metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Kind = TypeVar("Kind", bound=type)
Range = tuple[float, float]

_SHAPE = ("orthogonal", "scaling", "permutation", "translation")  # invariances that several metrics share
_UNITS = ("scaling", "permutation", "translation")
_ANGLES = ("orthogonal", "scaling", "permutation")


@dataclass(frozen=True)
class Described:
    """Description of a metric with its default options."""

    title: str  # name in text
    higher_is_better: bool  # whether a higher value means more similar
    range: Range  # smallest and largest value
    invariances: tuple[str, ...]  # transformations of a side that do not change the value
    use: str  # when to use it

    @property
    def direction(self) -> str:
        """Direction of more similar values: ``higher`` or ``lower``."""
        return "higher" if self.higher_is_better else "lower"


CATALOGUE = {
    "cca": Described(
        "mean canonical correlation", True, (0.0, 1.0), ("invertible", "orthogonal", *_UNITS),
        "whether layers contain the same linear information; requires far more samples than features",
    ),
    "direct_matching": Described(
        "residual of direct matching", False, (0.0, math.inf), (),
        "how far stitched activations are from the target's activations, in the same space",
    ),
    "disagreement": Described(
        "disagreement", False, (0.0, 1.0), ("scaling",),
        "share of samples with different predicted classes of two classifiers",
    ),
    "jaccard": Described(
        "Jaccard similarity of nearest neighbours", True, (0.0, 1.0), _ANGLES,
        "as mutual_knn, with shared neighbours as a share of all neighbours",
    ),
    "jensen_shannon": Described(
        "Jensen–Shannon divergence", False, (0.0, math.log(2)), (),
        "how much the predicted probabilities of two classifiers differ",
    ),
    "linear_cka": Described(
        "linear CKA", True, (0.0, 1.0), _SHAPE,
        "the default for layers of any widths; debiased=True for fewer samples than features",
    ),
    "linear_regression": Described(
        "R² of linear regression", True, (0.0, 1.0), _SHAPE,
        "how much of y a linear map of x explains, as a stitch by least squares would",
    ),
    "minibatch_cka": Described(
        "minibatch CKA", True, (-1.0, 1.0), _SHAPE,
        "linear CKA of very wide layers on many samples, in bounded memory; depends on their order",
    ),
    "mrr": Described(
        "mean reciprocal rank", True, (0.0, 1.0), ("scaling",),
        "whether a stitched vector retrieves its sample in the target's space",
    ),
    "mutual_knn": Described(
        "mutual nearest neighbours", True, (0.0, 1.0), _ANGLES,
        "whether the same samples are neighbours: local structure, also between modalities; about k / n by chance",
    ),
    "paired_cosine": Described(
        "cosine of paired rows", True, (-1.0, 1.0), ("scaling",),
        "whether stitched vectors point in the target's directions, in the same space; centre them first",
    ),
    "procrustes": Described(
        "orthogonal Procrustes distance", False, (0.0, math.sqrt(2)), _SHAPE,
        "a distance with the triangle inequality, strict about all directions; for clustering of networks",
    ),
    "pwcca": Described(
        "projection-weighted CCA", True, (0.0, 1.0), _UNITS,
        "CCA weighted by the share of x that directions explain; not symmetric; directions='all' counts parts y lacks",
    ),
    "rbf_cka": Described(
        "CKA of Gaussian kernels", True, (0.0, 1.0), _SHAPE,
        "as linear_cka, for near samples rather than for the directions of the largest variance",
    ),
    "relative_cosine": Described(
        "cosine of relative representations", True, (-1.0, 1.0), _SHAPE,
        "whether samples have the same similarities to anchors, before encoders are swapped",
    ),
    "rsa": Described(
        "representational similarity analysis", True, (-1.0, 1.0), ("scaling", "permutation"),
        "whether the same pairs of samples are distant; common in neuroscience",
    ),
    "shape_distance": Described(
        "shape distance", False, (0.0, math.pi / 2), _SHAPE,
        "an angle with the triangle inequality; alpha leads from procrustes (1) to cca (0)",
    ),
    "svcca": Described(
        "singular vector CCA", True, (0.0, 1.0), _SHAPE,
        "CCA of the directions of the largest variance, for noisy layers with more samples than directions",
    ),
}  # fmt: skip
"""Name -> description of every built-in metric."""


def built_in(name: str) -> Callable[[Kind], Kind]:
    """Declare that a class is a built-in metric, with attributes from the catalogue."""

    def declare(metric_class: Kind) -> Kind:
        for key, value in {**vars(CATALOGUE[name]), "name": name}.items():
            setattr(metric_class, key, value)
        return metric_class

    return declare
