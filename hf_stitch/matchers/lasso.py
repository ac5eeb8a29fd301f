"""Least squares with an L1 penalty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_stitch.matchers._affine import affine_stitch, recorded
from hf_stitch.matchers._solve import require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.options import Positive
from hf_stitch.papers import CSISZARIK_2021, Paper
from hf_stitch.statistics import Moments
from hf_stitch.stitches import LinearStitch

_SWEEPS = 10_000


@dataclass(frozen=True)
class Lasso(ClosedFormMatcher):
    """Lasso: the affine map that minimises ``‖XW + b - Y‖² / (2n) + alpha · Σ|W|``; the intercept b is not penalised.

    Equivalent to scikit-learn's ``Lasso(alpha)`` for each output. Many weights are exactly 0, which shows which
    features of the source each feature of the target needs (Li et al. 2016). Equation 3 of Csiszárik et al. (2021) uses
    the norm without the square, so its α has a different scale.

    The solver is coordinate descent on the moments, for all outputs at once, until the total duality gap is below
    ``tolerance`` times ``‖Y‖² / (2n)``.

    ``fitted`` contains ``n``, ``r2``, ``zeros`` (the share of weights that are 0) and ``sweeps``.

    Attributes:
        alpha: Penalty, greater than 0, in units of the target times units of the source.
        tolerance: Relative duality gap, greater than 0.

    Example:
        >>> x = torch.randn(200, 4, dtype=torch.float64)
        >>> Lasso(alpha=0.2).fit(Moments(4, 2).update(x, x[:, :2])).fitted["zeros"]
        0.75
    """

    name: ClassVar[str] = "lasso"
    title: ClassVar[str] = "sparse least squares (lasso)"
    papers: ClassVar[tuple[Paper, ...]] = (CSISZARIK_2021,)

    alpha: Positive
    tolerance: Positive = 1e-12

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Compute the map."""
        require(moments, 2)
        weight, sweeps = self._descend(moments.sxx / moments.n, moments.sxy / moments.n, moments.syy / moments.n)
        stitch = affine_stitch(LinearStitch, moments, {"weight": weight.T}, dtype)
        return recorded(stitch, moments, zeros=(stitch.weight == 0).double().mean().item(), sweeps=sweeps)

    def _descend(self, sxx: Tensor, sxy: Tensor, syy: Tensor) -> tuple[Tensor, int]:
        """The weights ``(dx, dy)``, and the number of sweeps over the features."""
        weight = torch.zeros_like(sxy)
        gradient = sxy.clone()  # negative gradient of the squared error: sxy - sxx · weight
        used = [j for j, own in enumerate(sxx.diagonal().tolist()) if own > 0]
        enough = self.tolerance * syy.trace() / 2
        for sweep in range(1, _SWEEPS + 1):
            for j in used:
                pull = gradient[j] + sxx[j, j] * weight[j]
                new = pull.sign() * (pull.abs() - self.alpha).clamp(min=0) / sxx[j, j]
                gradient -= torch.outer(sxx[:, j], new - weight[j])
                weight[j] = new
            if self._gap(weight, gradient, sxx, sxy, syy) <= enough:
                return weight, sweep
        raise ArithmeticError(
            f"the lasso did not reach a duality gap of {self.tolerance:g} in {_SWEEPS} sweeps: the features of the "
            "source are strongly correlated; raise alpha or the tolerance"
        )

    def _gap(self, weight: Tensor, gradient: Tensor, sxx: Tensor, sxy: Tensor, syy: Tensor) -> Tensor:
        """The duality gap, summed over the outputs (Kim et al. 2007, section III.B)."""
        squares = syy.diagonal() - 2 * (weight * sxy).sum(0) + (weight * (sxx @ weight)).sum(0)
        scale = (self.alpha / gradient.abs().amax(0).clamp(min=1e-300)).clamp(max=1)
        dual = scale * (syy.diagonal() - (weight * sxy).sum(0)) - scale.square() * squares / 2
        return (squares / 2 + self.alpha * weight.abs().sum(0) - dual).sum()
