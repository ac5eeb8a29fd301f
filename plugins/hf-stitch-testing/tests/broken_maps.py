"""Similarities, selections, stitches and matchers, each with a defect to choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from broken import Broken, WithDefect
from hf_stitch_testing import check_matcher, check_selection, check_similarity, check_stitch
from torch import Tensor

from hf_stitch.data import Samples
from hf_stitch.matchers import ClosedFormMatcher, UnpairedMatcher
from hf_stitch.matchers.alignment import Procrustes
from hf_stitch.registry import registries
from hf_stitch.relative.selection import Selection
from hf_stitch.relative.similarities import Similarity
from hf_stitch.statistics import Moments
from hf_stitch.stitches import LinearStitch, SequenceStitch, Stitch


@dataclasses.dataclass(frozen=True)
class Products(WithDefect, Similarity):
    """Inner products."""

    name: ClassVar[str] = "products"

    @property
    def invariances(self) -> Any:
        return ("permutation",) if self.defect == "invariances" else ("orthogonal", "permutation")

    def __call__(self, x: Tensor, anchors: Tensor) -> Tensor:
        if self.defect == "mismatches":
            width = min(x.shape[-1], anchors.shape[-1])
            return (x.to(anchors)[..., :width]) @ anchors[..., :width].T
        values = super().__call__(x, anchors)
        if self.defect == "shapes" and x.ndim > 2:
            return values.flatten(0, -2)
        if self.defect == "pure" and not x.requires_grad:
            anchors.add_(1).add_(-1 + 1e-15)
        if self.defect == "dtypes" and x.dtype == torch.bfloat16:
            return values.float()
        return 1.001 * values if self.defect == "independent" and x.ndim == 1 else values

    def against(self, anchors: Tensor) -> Any:
        return lambda x: (x.detach() if self.defect == "gradient" else x) @ anchors.T


SIMILARITIES = {
    "config": "must rebuild",
    "pure": "must not be modified",
    "shapes": r"output for shape \(3, 3, 6\) must be",
    "independent": "must not depend on the remaining vectors",
    "dtypes": "output for torch.bfloat16 must be torch.bfloat16, got torch.float32",
    "mismatches": "vectors narrower than the anchors must raise ValueError",
    "invariances": "is invariant to orthogonal but does not declare it",
    "gradient": "the gradient at the vectors",
}
COUNTED: list[int] = []


@dataclasses.dataclass(frozen=True)
class First(WithDefect, Selection):
    """The first samples."""

    name: ClassVar[str] = "first"

    @property
    def needs(self) -> Any:
        return "samples" if self.defect == "needs" else "features"

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        if self.defect == "pure":
            torch.rand(1)
        if self.defect == "repeatable":
            COUNTED.append(count)
            return [(place + len(COUNTED)) % len(samples) for place in range(count)]
        return list(range(max(1, count - (self.defect == "distinct"))))


SELECTIONS = {
    "config": "must rebuild",
    "distinct": "must return 12 different samples",
    "repeatable": "two selections of 1 samples must be equal",
    "pure": "must not change torch's random state",
    "needs": "needs must be labels, features or None, got 'samples'",
}


class Shifted(Stitch):
    """A shift."""

    name: ClassVar[str] = "shifted"

    def __init__(self, in_features: int, out_features: int, defect: str = "") -> None:
        super().__init__(in_features, out_features)
        self.defect, self.affine = defect, defect != "dtypes"
        self.register_buffer("shift", torch.linspace(1, 2, in_features), persistent=defect != "rebuilt")

    def forward(self, x: Tensor) -> Tensor:
        if self.defect == "width" and x.shape[-1] != self.in_features:
            return x
        return super().forward(x)

    def transform(self, x: Tensor) -> Tensor:
        if self.defect == "saved":
            x = x + self.training
        if self.defect == "independent" and x.ndim == 1:
            return x + self.shift + 1e-6
        if self.defect == "shapes" and not x.numel():
            return x[..., :1]
        if self.defect == "affine":
            return x + self.shift + x.square()
        x = x.detach() if self.defect == "gradients" else x
        return (x + self.shift).float() if self.defect == "dtypes" else x + self.shift

    def config(self) -> dict[str, Any]:
        return {"in_features": self.in_features, "out_features": self.out_features, "defect": self.defect}


class Other(Shifted):
    """Another class of the same name."""

    def to_dict(self) -> dict[str, Any]:
        return Shifted(3, 3).to_dict()


STITCHES = {
    "registered": "'shifted' is registered as",
    "rebuilt": "shift is not in the state dict",
    "saved": "a saved and loaded stitch must have equal outputs",
    "shapes": r"output for shape \(0, 3, 3\) must be",
    "dtypes": "must compute in float64",
    "independent": "must not depend on the remaining vectors",
    "affine": "the map is not affine",
    "gradients": "the input must receive a gradient",
    "width": r"an input of shape .2, 4. must raise ValueError",
}


class Summed(SequenceStitch):
    """The sum of a position and those before it."""

    name: ClassVar[str] = "summed"

    def __init__(self, in_features: int, out_features: int, defect: str = "") -> None:
        super().__init__(in_features, out_features, causal=True)
        self.defect = defect
        self.register_buffer("scale", torch.ones(()))

    def transform_sequence(self, x: Tensor, mask: Tensor | None) -> Tensor:
        real = x if mask is None or self.defect == "padding" else x * mask[..., None]
        summed = real.sum(-2, keepdim=True).expand_as(x) if self.defect == "causal" else real.cumsum(-2)
        return self.scale * summed

    config = Shifted.config


SEQUENCES = {"padding": "must not depend on values at masked positions", "causal": "must not depend on later positions"}


@dataclasses.dataclass(frozen=True)
class Diagonal(WithDefect, ClosedFormMatcher):
    """A matcher for equal widths."""

    name: ClassVar[str] = "diagonal"
    unequal_widths: ClassVar[bool] = False
    fits_so_far: ClassVar[int] = 0

    @property
    def invariances(self) -> Any:
        return ("orthogonal",) if self.defect == "invariances" else ("scaling", "translation")

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> Stitch:
        if moments.dx != moments.dy and self.defect != "unequal_widths":
            raise ValueError(f"diagonal needs equal widths, got {moments.dx} and {moments.dy}")
        if moments.n < 2 and not (self.defect == "empty" and not moments.n):
            raise ValueError("diagonal needs rows")
        if moments.n and min(moments.sxx.trace(), moments.syy.trace()) < 1e-12 and self.defect != "dead":
            raise ValueError("diagonal needs rows of x and y that vary")
        ratio = moments.sxy.diagonal()[:8] / moments.sxx.diagonal()[:8]
        if self.defect == "repeatable":
            ratio = ratio * (1 + 1e-13 * Diagonal.fits_so_far)
            Diagonal.fits_so_far += 1
        if self.defect == "repeated":
            ratio = ratio * (1 - 1 / moments.n)
        sxx, sxy = moments.sxx.diagonal()[:8], moments.sxy.diagonal()[:8]
        r2 = ((2 * ratio * sxy - ratio.square() * sxx).sum() / moments.syy.trace()).item()
        if self.defect == "pure":
            moments.syy.zero_()
        kind = type("Other", (LinearStitch,), {}) if self.defect == "stitch" else LinearStitch
        weight = torch.zeros(moments.dy, moments.dx, dtype=torch.float64)
        weight.diagonal()[:8] = ratio
        stitch = kind.of(weight=weight, bias=moments.mean_y - weight @ moments.mean_x).to(dtype)
        if self.defect == "streamed":  # what rounding leaves of the mean differs from order to order of the rows
            stitch.bias.data += 1e6 * (moments.mean_x.sum() - round(moments.mean_x.sum().item(), 12))
        stitch.fitted = {} if self.defect == "fitted" else {"n": moments.n, "r2": r2}
        return stitch


MATCHERS = {
    "config": "must rebuild",
    "pure": "must not modify the moments",
    "repeatable": "twice, the stitch differs",
    "streamed": "fitted to the same rows .*, the stitch differs by .* > 1e-10",
    "invariances": "fitted with x transformed by orthogonal, the stitch differs",
    "repeated": "fitted to each row twice .otherwise set counts_rows = True.",
    "fitted": "fitted must contain 'r2' and n=200",
    "dead": "fitting equal rows of x must raise ValueError",
    "empty": r"fitting 0 rows of widths 12 and 12 must raise ValueError",
    "unequal_widths": r"fitting 200 rows of widths 12 and 8 must raise ValueError",
    "stitch": "'linear' is registered as",
}


@dataclasses.dataclass(frozen=True)
class Careless(UnpairedMatcher):
    """Procrustes on the pairs alone, which may forget where the rows of the target are."""

    name: ClassVar[str] = "careless"
    title: ClassVar[str] = "Procrustes on few pairs"
    unequal_widths: ClassVar[bool] = False
    least_pairs: ClassVar[int] = 2
    defect: str = ""

    def fit(self, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32, **unpaired: Any) -> LinearStitch:
        if x.shape[1] != y.shape[1]:
            raise ValueError("careless needs equal widths")
        stitch = Procrustes().fit(Moments(x.shape[1], y.shape[1]).update(x, y), dtype)
        if self.defect and stitch.bias is not None:
            stitch.bias.data += 100
        return stitch


TABLES = [
    Broken(check_similarity, lambda part: (Products(part),), SIMILARITIES, registries.similarities),
    Broken(check_selection, lambda part: (First(part),), SELECTIONS, registries.anchors),
    Broken(
        check_stitch,
        lambda part: (Other(3, 3) if part == "registered" else Shifted(3, 3, part),),
        STITCHES,
        registries.stitches,
        Shifted,
        also={"registered": {"saved"}, "rebuilt": {"saved"}},
    ),
    Broken(check_stitch, lambda part: (Summed(3, 3, part),), SEQUENCES, registries.stitches),
    Broken(check_matcher, lambda part: (Diagonal(part),), MATCHERS, registries.matchers),
    Broken(
        check_matcher,
        lambda part: (Careless(defect=part),),
        {"unpaired": "must be near to their partners"},
        registries.matchers,
    ),
]
