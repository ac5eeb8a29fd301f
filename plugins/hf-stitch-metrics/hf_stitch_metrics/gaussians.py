"""Fréchet distance between two Gaussians: compares means and covariances of two sets of activations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_stitch.metrics import MomentsMetric, of_rows
from hf_stitch.metrics._rows import RowMoments, check_count, check_widths, nonnegative
from hf_stitch.papers import Paper, arxiv
from hf_stitch.statistics.spectrum import SecondMoments

DOWSON_1982 = Paper(
    "Dowson & Landau: The Fréchet distance between multivariate normal distributions",
    "https://doi.org/10.1016/0047-259X(82)90077-X",
)
HEUSEL_2017 = arxiv(
    "Heusel et al.: GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash Equilibrium", "1706.08500"
)


@of_rows
def frechet(x: Tensor, y: Tensor) -> Tensor:
    """Compute the relative squared Fréchet distance of Gaussians with the moments of x and y (Dowson & Landau 1982).

    The value is ``(‖μx - μy‖² + tr(Cx + Cy - 2 (Cx Cy)^½)) / (tr Cy + ‖μy‖²)``, in the units of ``direct_matching``, an
    upper bound. It is 0 exactly if means and covariances are equal; the order of the rows does not matter. Without the
    denominator, it is the formula of the Fréchet inception distance (Heusel et al. 2017).

    Directions with less than ``d`` · 2e-16 of the largest variance count as constant, because rounding error of the
    covariance hides them. Values from rows and from streamed moments agree to about 1e-8.

    Args:
        x: Activations of the source after the stitching layer, ``(n, d)``, floating point.
        y: Activations of the target, ``(n, d)``, floating point.

    Example:
        >>> import torch
        >>> y = torch.randn(50, 4)
        >>> round(frechet(y.flip(0), y).item(), 6), round(frechet(0 * y, y).item(), 6)
        (0.0, 1.0)
    """
    check_widths("frechet", x, y)
    return _frechet(RowMoments(x, y))


def _frechet(moments: SecondMoments) -> Tensor:
    check_count("frechet", moments.n, 2)
    check_widths("frechet", moments.mean_x, moments.mean_y)
    target_scale = moments.syy.trace() + moments.n * moments.mean_y.square().sum()
    if target_scale == 0:
        raise ValueError(
            "frechet: y is all zero, so that the relative distance is undefined; check whether the layer is dead"
        )
    # Unlike eigenvalues of the product, singular values have a gradient where x does not vary.
    root_x = moments.x if isinstance(moments, RowMoments) else _root(moments.sxx)
    overlap = torch.linalg.svdvals(root_x @ _root(moments.syy)).sum()
    variation = moments.sxx.trace() + moments.syy.trace()
    spread = nonnegative("frechet", variation - 2 * overlap, variation.detach(), len(moments.mean_y) + moments.n)
    return (moments.n * (moments.mean_x - moments.mean_y).square().sum() + spread) / target_scale


def _root(scatter: Tensor) -> Tensor:
    eigenvalues, vectors = torch.linalg.eigh(scatter)
    # Rounding error gives constant directions an eigenvalue of about eps, with a root of 1e-8.
    is_varying = eigenvalues > len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps * eigenvalues.max()
    basis = vectors[:, is_varying]
    return basis * eigenvalues[is_varying].sqrt() @ basis.T


class Frechet(MomentsMetric):
    """Streaming ``frechet``."""

    name = "frechet"
    title = "relative squared Fréchet distance"
    papers = (DOWSON_1982, HEUSEL_2017)
    function = staticmethod(frechet)
    formula = staticmethod(_frechet)
    higher_is_better = False
    range = (0.0, math.inf)
    symmetric = False
    differentiable = True
    equal_widths = True
