"""A map from few pairs and many rows without partners, by mutual neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.matchers._affine import recorded, require
from hf_stitch.matchers.alignment import Procrustes
from hf_stitch.matchers.base import NoAlignmentError, UnpairedMatcher
from hf_stitch.options import Count, Natural, Within
from hf_stitch.papers import Paper, arxiv
from hf_stitch.statistics import Moments
from hf_stitch.stitches import LinearStitch
from hf_stitch_embeddings.row_matchers import moments_of

LAMPLE_2018 = arxiv("Lample et al.: Word translation without parallel data", "1710.04087")

FOLDS = 10
"""Parts of the seeds, each of which is searched under the map of the others."""
CHANCE = 3.0
"""Standard errors of independent ranks by which seeds that are left out must be found better than by chance. Ranks of
seeds depend on each other, so that unrelated rows differ by 1.3 to 1.5 of them."""
ROUNDING = 8 * torch.finfo(torch.float32).eps
"""Singular values below this share of the largest, times the width, are rounding."""


@dataclass(frozen=True)
class SeededRefinement(UnpairedMatcher):
    """Procrustes on few pairs, then on rows that are each other's nearest neighbours under it, and so on.

    The pairs (*seeds*) stay, and rows without partners are added that are mutual neighbours by CSLS
    (Lample et al. 2018). A map of few seeds is used only in the directions that they span; the result is the orthogonal
    map of all pairs (``procrustes``), with the means of all rows, scaled so that mapped rows vary as much as those
    of the target.

    With hundreds of pairs, and rows of which none has a partner, ``procrustes`` on the pairs alone is better:
    pairs that were found then add more errors than knowledge.

    Seeds that are left out are searched under the map of the others first. If they are not found better than by chance,
    the fit is refused, since a refinement of a random map looks as good to itself as any other. This test takes rows as
    independent, and seeds as drawn from the same data as the other rows: positions of the same image or text, or seeds
    of another kind, pass it more easily.

    ``fitted`` contains ``n`` (pairs of the last fit), ``r2`` on these, which says little because they were chosen to be
    near, the number of ``seeds`` and of ``mutual`` neighbours, the ``rounds`` with all rows, whether the pairs were
    ``stable`` at the end, and ``seed_rank``: the mean share of rows nearer than the partner of a seed that was left out
    (chance: 0.5).

    Attributes:
        neighbours: Number of neighbours of CSLS.
        iterations: Rounds with random halves of the rows, and greatest number of rounds with all rows.
        rows: Rows without partners that are read at most, of each side; more are drawn from.
        seed: Seed of the halves, and of the rows that are drawn.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> x, turn = torch.randn(600, 8, generator=g), torch.linalg.qr(torch.randn(8, 8, generator=g)).Q
        >>> y = x @ turn
        >>> stitch = SeededRefinement().fit(x[:10], y[:10], unpaired=(x[10:], y[10:].flip(0)))
        >>> (stitch(x) - y).norm() < 1e-3 * y.norm()
        tensor(True)
    """

    name: ClassVar[str] = "seeded_refinement"
    title: ClassVar[str] = "Procrustes on few pairs, refined by mutual neighbours"
    papers: ClassVar[tuple[Paper, ...]] = (LAMPLE_2018,)
    least_pairs: ClassVar[int] = 5

    neighbours: Count = 10
    iterations: Count = 20
    rows: Annotated[int, Within(2)] = 6000
    seed: Natural = 0

    @torch.no_grad()
    def fit(
        self, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32, *, unpaired: tuple[Tensor, Tensor] | None = None
    ) -> LinearStitch:
        """Fit the map; neighbours are searched in float32, the map is computed in float64."""
        seeds = moments_of(x, y)
        require(seeds, self.least_pairs, "give more pairs, or use 'unsupervised'")
        if unpaired is None:
            raise ValueError(
                f"{self.name} needs rows without partners beside the {len(x)} pairs: unpaired=(rows of the source, "
                "rows of the target); with pairs alone use 'procrustes'"
            )
        check_unpaired(*unpaired, x.shape[1], y.shape[1])
        x, y = x.detach().cpu().double(), y.detach().cpu().double()
        u, v = (some_rows(rows, self.rows, self.seed + side) for side, rows in enumerate(unpaired))
        of_x, of_y = torch.cat([x, u]).mean(0), torch.cat([y, v]).mean(0)
        centred = [rows.float() for rows in (x - of_x, y - of_y, u - of_x, v - of_y)]
        rank, score = _left_out(centred[0], centred[1], centred[3])
        if score < CHANCE:
            raise NoAlignmentError(
                f"seeds that are left out are not found under the map of the others: on average {rank:.0%} of the "
                f"rows are nearer than the right one, and by chance it is 50% ({score:.1f} standard errors better, "
                f"{CHANCE:g} are needed). Either both sides are unrelated, or the {len(x)} pairs are wrong or too few"
            )
        found = refined(
            (centred[0], centred[1]), centred[2], centred[3], neighbours=self.neighbours, iterations=self.iterations,
            seed=self.seed, keep=True,
        )  # fmt: skip
        moments = moments_of(torch.cat([x, u[found.x]]), torch.cat([y, v[found.y]]))
        moments.eps = seeds.eps
        stitch = orthogonal(moments, torch.cat([x, u]), torch.cat([y, v]), dtype)
        stitch.fitted |= {
            "seeds": len(x), "mutual": len(found.x), "rounds": found.rounds, "stable": found.stable, "seed_rank": rank,
        }  # fmt: skip
        return stitch


def _left_out(x: Tensor, y: Tensor, others: Tensor) -> tuple[float, float]:
    """Search seeds under the map of the others.

    Returns the mean share of the other rows that are nearer than the partner, and by how many standard errors of ranks
    by chance it is below a half.
    """
    nearer = []
    for fold in torch.arange(len(x)).chunk(FOLDS):
        kept = torch.ones(len(x), dtype=torch.bool)
        kept[fold] = False
        left, right = span(x[kept], y[kept])
        asked = unit(x[fold] @ left)
        own = (asked * unit(y[fold] @ right)).sum(1, keepdim=True)
        nearer.append((asked @ unit(others @ right).T > own).double().mean(1))
    rank = torch.cat(nearer).mean().item()
    return rank, (0.5 - rank) * (12 * len(x)) ** 0.5


def unit(rows: Tensor) -> Tensor:
    """Divide rows by their lengths; a row of zeros stays."""
    return functional.normalize(rows, dim=1)


def mutual_neighbours(x: Tensor, y: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the rows that are each other's nearest by cross-domain similarity local scaling (Lample et al. 2018, eq. 3).

    ``CSLS(x, y) = 2 cos(x, y) - r(x) - r(y)``, where r is the mean cosine to the k nearest rows of the other side, so
    that rows that are near to everything are not nearest to everything. All similarities are in memory.
    """
    cosines = unit(x) @ unit(y).T
    of_x = cosines.topk(min(k, len(y)), dim=1).values.mean(1)
    of_y = cosines.topk(min(k, len(x)), dim=0).values.mean(0)
    scaled = cosines.mul_(2).sub_(of_x[:, None]).sub_(of_y)
    partner, back = scaled.argmax(1), scaled.argmax(0)
    mutual = (back[partner] == torch.arange(len(x), device=x.device)).nonzero()[:, 0]
    return mutual, partner[mutual]


def span(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the directions of x and of y in which pairs of centred rows agree, most first.

    They are the singular vectors of ``xᵀy`` without those that rounding determines. Few pairs say nothing about the
    other directions, in which an orthogonal map of full rank would be arbitrary.
    """
    left, values, right = torch.linalg.svd(x.T @ y, full_matrices=False)
    kept = values > values[0] * max(x.shape[1], y.shape[1]) * ROUNDING
    return left[:, kept], right.T[:, kept]


@dataclass(frozen=True)
class Refined:
    """Pairs of a refinement."""

    x: Tensor  # numbers of rows of x
    y: Tensor  # numbers of their partners
    rounds: int  # number of rounds with all rows
    stable: bool  # whether the last of them changed no pair


def refined(
    start: tuple[Tensor, Tensor], x: Tensor, y: Tensor, *, neighbours: int, iterations: int, seed: int,
    keep: bool = False, whole: bool = True,
) -> Refined:  # fmt: skip
    """Find mutual neighbours under the map of some pairs, take them as the pairs, and so on.

    First ``iterations`` rounds with random halves of the rows, each with another half, so that pairs that are wrong do
    not confirm themselves; then rounds with all rows until no pair changes, ``iterations`` at most.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs, found = start, (torch.empty(0), torch.empty(0))
    rounds, stable = 0, False
    for number in range(2 * iterations if whole else iterations):
        halves = number < iterations
        some, other = (
            torch.randperm(count, generator=generator)[: max(2, count // 2)] if halves else torch.arange(count)
            for count in (len(x), len(y))
        )
        left, right = span(*pairs)
        i, j = mutual_neighbours(x[some] @ left, y[other] @ right, neighbours)
        i, j = some[i], other[j]
        if not halves:
            rounds += 1
            stable = torch.equal(i, found[0]) and torch.equal(j, found[1])
        found = i, j
        if stable:
            break
        pairs = (torch.cat([start[0], x[i]]), torch.cat([start[1], y[j]])) if keep else (x[i], y[j])
    return Refined(*found, rounds, stable)


@torch.no_grad()
def orthogonal(moments: Moments, x: Tensor, y: Tensor, dtype: torch.dtype) -> LinearStitch:
    """Return the orthogonal map of pairs that were searched, with the means and the spread of all rows.

    Pairs that were searched are near, but not all are partners. The scale of least squares would shrink with their
    errors, and their means are those of the rows that happened to be paired.
    """
    found = Procrustes().fit(moments, torch.float64)
    rotation, of_x, of_y = found.weight.detach(), x.mean(0), y.mean(0)
    # Only the directions that the map joins: the wider side has others.
    spread_x, spread_y = (
        (rows @ turn).square().mean(0).sum() for rows, turn in ((x - of_x, rotation.T), (y - of_y, rotation))
    )
    scale = (spread_y / spread_x).sqrt()
    weight = (scale * rotation).to(dtype)
    stitch = LinearStitch.of(weight=weight, bias=(of_y - weight.double() @ of_x).to(dtype))
    return recorded(stitch, moments, scale=scale.item(), xy_rank=int(found.fitted["xy_rank"]))


def check_unpaired(x: Tensor, y: Tensor, dx: int, dy: int) -> None:
    """Check rows of both sides that have no partners."""
    for side, rows, width in (("source", x, dx), ("target", y, dy)):
        if rows.ndim != 2 or rows.shape[1] != width or len(rows) < 2:
            raise ValueError(
                f"unpaired rows of the {side} must have shape (n, {width}) with n >= 2, got {tuple(rows.shape)}"
            )
        if not rows.is_floating_point():
            raise TypeError(f"unpaired rows of the {side} must be floating point, got {rows.dtype}")
        if not bool(rows.isfinite().all()):
            raise ValueError(f"unpaired rows of the {side} contain NaN or infinity; drop these rows")


def some_rows(rows: Tensor, count: int, seed: int) -> Tensor:
    """Return rows on the CPU in float64 and in random order, at most ``count``."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]
    return rows.detach().cpu()[order].double()
