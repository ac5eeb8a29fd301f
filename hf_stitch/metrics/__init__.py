"""Metrics: how alike two representations, or the outputs of two networks, are.

Every metric is a pure function ``hf_stitch.metrics.<name>(x, y, **options)`` of paired rows (n × d arrays give a float,
tensors a 0-d tensor, both computed in float64) and a class that streams, ``registries.metrics.get(name)``. A metric of
your own is a formula decorated with ``of_rows`` and a subclass of ``MomentsMetric``, ``FeaturesMetric`` or
``MeanMetric``; ``hf_stitch.testing`` checks it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_stitch.metrics._cca import cca as cca
    from hf_stitch.metrics._cca import pwcca as pwcca
    from hf_stitch.metrics._cca import svcca as svcca
    from hf_stitch.metrics._cka import linear_cka as linear_cka
    from hf_stitch.metrics._cka import minibatch_cka as minibatch_cka
    from hf_stitch.metrics._cka import rbf_cka as rbf_cka
    from hf_stitch.metrics._evaluate import SimilarityMetric as SimilarityMetric
    from hf_stitch.metrics._matching import correlation_matching as correlation_matching
    from hf_stitch.metrics._matching import soft_matching as soft_matching
    from hf_stitch.metrics._neighbours import jaccard as jaccard
    from hf_stitch.metrics._neighbours import mrr as mrr
    from hf_stitch.metrics._neighbours import mutual_knn as mutual_knn
    from hf_stitch.metrics._neighbours import paired_cosine as paired_cosine
    from hf_stitch.metrics._neighbours import rank_similarity as rank_similarity
    from hf_stitch.metrics._neighbours import second_order_cosine as second_order_cosine
    from hf_stitch.metrics._options import Within as Within
    from hf_stitch.metrics._outputs import accuracy_difference as accuracy_difference
    from hf_stitch.metrics._outputs import disagreement as disagreement
    from hf_stitch.metrics._outputs import jensen_shannon as jensen_shannon
    from hf_stitch.metrics._procrustes import procrustes as procrustes
    from hf_stitch.metrics._regression import direct_matching as direct_matching
    from hf_stitch.metrics._regression import linear_regression as linear_regression
    from hf_stitch.metrics._relative import relative_cosine as relative_cosine
    from hf_stitch.metrics._rows import of_rows as of_rows
    from hf_stitch.metrics._rsa import distance_correlation as distance_correlation
    from hf_stitch.metrics._rsa import rsa as rsa
    from hf_stitch.metrics._shape import shape_distance as shape_distance
    from hf_stitch.metrics.base import FeaturesMetric as FeaturesMetric
    from hf_stitch.metrics.base import MeanMetric as MeanMetric
    from hf_stitch.metrics.base import Metric as Metric
    from hf_stitch.metrics.base import MomentsMetric as MomentsMetric
    from hf_stitch.metrics.base import build_metric as build_metric

_HOMES = {
    "_cca": ("cca", "pwcca", "svcca"),
    "_cka": ("linear_cka", "minibatch_cka", "rbf_cka"),
    "_evaluate": ("SimilarityMetric",),
    "_matching": ("correlation_matching", "soft_matching"),
    "_neighbours": ("jaccard", "mrr", "mutual_knn", "paired_cosine", "rank_similarity", "second_order_cosine"),
    "_options": ("Within",),
    "_outputs": ("accuracy_difference", "disagreement", "jensen_shannon"),
    "_procrustes": ("procrustes",),
    "_regression": ("direct_matching", "linear_regression"),
    "_relative": ("relative_cosine",),
    "_rows": ("of_rows",),
    "_rsa": ("distance_correlation", "rsa"),
    "_shape": ("shape_distance",),
    "base": ("FeaturesMetric", "MeanMetric", "Metric", "MomentsMetric", "build_metric"),
}
_PUBLIC = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_PUBLIC))}")
    value = getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What there is to import, imported or not."""
    return sorted({*globals(), *_PUBLIC})
