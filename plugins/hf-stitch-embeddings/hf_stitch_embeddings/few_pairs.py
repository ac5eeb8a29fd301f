"""Matcher for few pairs and many unpaired rows, by mutual nearest neighbours."""

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
"""Folds of the seeds; each fold is searched under the map of the remaining folds."""
CHANCE = 3.0
"""Required z-score of the ranks of held-out seeds under independence. Ranks of seeds depend on each other, so that
unrelated rows reach 1.3 to 1.5."""
ROUNDING = 8 * torch.finfo(torch.float32).eps
"""Singular values below this share of the largest, times the width, are float32 rounding error."""


@dataclass(frozen=True)
class SeededRefinement(UnpairedMatcher):
    """Procrustes on few pairs, refined iteratively on mutual nearest neighbours.

    The fit keeps the pairs (*seeds*) and adds unpaired rows that are mutual nearest neighbours by CSLS (Lample et al.
    2018). The map of few seeds is used only in the directions that they span. The result is the orthogonal map of all
    pairs (``procrustes``) with the means of all rows, scaled so that mapped rows vary as much as target rows.

    With hundreds of pairs, and rows without true partners, ``procrustes`` on the pairs alone is better: mutual
    neighbours then add more errors than information.

    The fit first searches held-out seeds under the map of the remaining seeds. If their ranks are not better than
    chance, it raises an error, because the refinement of a random map cannot be recognised afterwards. This test
    assumes independent rows, and seeds from the same distribution as the unpaired rows: positions of the same image or
    text, or seeds of another kind, pass it more easily.

    ``fitted`` contains ``n`` (pairs of the last fit), ``r2`` on these pairs (optimistic: they were selected to be
    near), the number of ``seeds`` and of ``mutual`` neighbours, the ``rounds`` with all rows, whether the pairs were
    ``stable`` at the end, and ``seed_rank``: the mean share of rows nearer than the partner of a held-out seed
    (chance: 0.5).

    Attributes:
        neighbours: Number of neighbours of CSLS.
        iterations: Rounds with random halves of the rows, and maximum number of rounds with all rows.
        rows: Maximum number of unpaired rows of each side; larger sets are subsampled.
        seed: Seed of the halves and of the subsample.

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
        """Fit the map in float64, with a neighbour search in float32."""
        seeds = moments_of(x, y)
        require(seeds, self.least_pairs, "pass more pairs, or use 'unsupervised'")
        if unpaired is None:
            raise ValueError(
                f"{self.name} requires unpaired rows in addition to the {len(x)} pairs: pass unpaired=(source rows, "
                "target rows), or use 'procrustes' with pairs alone"
            )
        check_unpaired(*unpaired, x.shape[1], y.shape[1])
        x, y = x.detach().cpu().double(), y.detach().cpu().double()
        u, v = (subsample(rows, self.rows, self.seed + side) for side, rows in enumerate(unpaired))
        x_mean, y_mean = torch.cat([x, u]).mean(0), torch.cat([y, v]).mean(0)
        centred = [rows.float() for rows in (x - x_mean, y - y_mean, u - x_mean, v - y_mean)]
        rank, score = _held_out_rank(centred[0], centred[1], centred[3])
        if score < CHANCE:
            raise NoAlignmentError(
                f"held-out seeds are not found better than chance: on average {rank:.0%} of the rows are nearer than "
                f"the correct row (chance: 50%; z-score {score:.1f}, {CHANCE:g} required). Check the {len(x)} pairs or "
                "pass more; the two sides may be unrelated"
            )
        refinement = refine(
            (centred[0], centred[1]), centred[2], centred[3], neighbours=self.neighbours, iterations=self.iterations,
            seed=self.seed, keep=True,
        )  # fmt: skip
        moments = moments_of(torch.cat([x, u[refinement.x]]), torch.cat([y, v[refinement.y]]))
        moments.eps = seeds.eps
        stitch = orthogonal(moments, torch.cat([x, u]), torch.cat([y, v]), dtype)
        stitch.fitted |= {
            "seeds": len(x), "mutual": len(refinement.x), "rounds": refinement.rounds, "stable": refinement.stable,
            "seed_rank": rank,
        }  # fmt: skip
        return stitch


def _held_out_rank(x: Tensor, y: Tensor, unpaired: Tensor) -> tuple[float, float]:
    """Search held-out seeds under the map of the remaining seeds.

    Returns the mean share of unpaired rows that are nearer than the partner, and its z-score below one half.
    """
    nearer = []
    for fold in torch.arange(len(x)).chunk(FOLDS):
        fit_mask = torch.ones(len(x), dtype=torch.bool)
        fit_mask[fold] = False
        x_span, y_span = span(x[fit_mask], y[fit_mask])
        queries = unit_rows(x[fold] @ x_span)
        partner_cosines = (queries * unit_rows(y[fold] @ y_span)).sum(1, keepdim=True)
        nearer.append((queries @ unit_rows(unpaired @ y_span).T > partner_cosines).double().mean(1))
    rank = torch.cat(nearer).mean().item()
    return rank, (0.5 - rank) * (12 * len(x)) ** 0.5


def unit_rows(rows: Tensor) -> Tensor:
    """Divide rows by their lengths; zero rows stay unchanged."""
    return functional.normalize(rows, dim=1)


def mutual_neighbours(x: Tensor, y: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return mutual nearest neighbours by cross-domain similarity local scaling (Lample et al. 2018, eq. 3).

    ``CSLS(x, y) = 2 cos(x, y) - r(x) - r(y)``, where r is the mean cosine to the k nearest rows of the opposite side.
    The correction penalises hubs. All similarities are held in memory.
    """
    cosines = unit_rows(x) @ unit_rows(y).T
    x_mean_cosines = cosines.topk(min(k, len(y)), dim=1).values.mean(1)
    y_mean_cosines = cosines.topk(min(k, len(x)), dim=0).values.mean(0)
    scaled = cosines.mul_(2).sub_(x_mean_cosines[:, None]).sub_(y_mean_cosines)
    partner, back = scaled.argmax(1), scaled.argmax(0)
    mutual = (back[partner] == torch.arange(len(x), device=x.device)).nonzero()[:, 0]
    return mutual, partner[mutual]


def span(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the directions of x and y that paired, centred rows share, strongest first.

    The directions are singular vectors of ``xᵀy``, without singular values at the level of rounding error. Few pairs do
    not determine the remaining directions, where an orthogonal map of full rank would be arbitrary.
    """
    left, values, right = torch.linalg.svd(x.T @ y, full_matrices=False)
    significant = values > values[0] * max(x.shape[1], y.shape[1]) * ROUNDING
    return left[:, significant], right.T[:, significant]


@dataclass(frozen=True)
class Refinement:
    """Pairs found by :func:`refine`."""

    x: Tensor  # numbers of rows of x
    y: Tensor  # numbers of their partners
    rounds: int  # number of rounds with all rows
    stable: bool  # whether the last of them left all pairs unchanged


def refine(
    start: tuple[Tensor, Tensor], x: Tensor, y: Tensor, *, neighbours: int, iterations: int, seed: int,
    keep: bool = False, whole: bool = True,
) -> Refinement:  # fmt: skip
    """Alternate between fitting a map to pairs and taking mutual neighbours under it as the new pairs.

    The first ``iterations`` rounds use fresh random halves of the rows, to keep wrong pairs from confirming each other.
    Then rounds with all rows run until no pair changes, at most ``iterations``.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs, mutual = start, (torch.empty(0), torch.empty(0))
    rounds, stable = 0, False
    for round_number in range(2 * iterations if whole else iterations):
        use_halves = round_number < iterations
        x_rows, y_rows = (
            torch.randperm(count, generator=generator)[: max(2, count // 2)] if use_halves else torch.arange(count)
            for count in (len(x), len(y))
        )
        left, right = span(*pairs)
        i, j = mutual_neighbours(x[x_rows] @ left, y[y_rows] @ right, neighbours)
        i, j = x_rows[i], y_rows[j]
        if not use_halves:
            rounds += 1
            stable = torch.equal(i, mutual[0]) and torch.equal(j, mutual[1])
        mutual = i, j
        if stable:
            break
        pairs = (torch.cat([start[0], x[i]]), torch.cat([start[1], y[j]])) if keep else (x[i], y[j])
    return Refinement(*mutual, rounds, stable)


@torch.no_grad()
def orthogonal(moments: Moments, x: Tensor, y: Tensor, dtype: torch.dtype) -> LinearStitch:
    """Return the orthogonal map of mutual neighbours, with the means and the spread of all rows.

    Not all mutual neighbours are true partners. Their errors would shrink a least-squares scale, and their means would
    describe only the rows that happened to be paired.
    """
    procrustes = Procrustes().fit(moments, torch.float64)
    rotation, x_mean, y_mean = procrustes.weight.detach(), x.mean(0), y.mean(0)
    # Only the directions that the map joins: the wider side has additional ones.
    spread_x, spread_y = (
        (rows @ projection).square().mean(0).sum()
        for rows, projection in ((x - x_mean, rotation.T), (y - y_mean, rotation))
    )
    scale = (spread_y / spread_x).sqrt()
    weight = (scale * rotation).to(dtype)
    stitch = LinearStitch.of(weight=weight, bias=(y_mean - weight.double() @ x_mean).to(dtype))
    return recorded(stitch, moments, scale=scale.item(), xy_rank=int(procrustes.fitted["xy_rank"]))


def check_unpaired(x: Tensor, y: Tensor, dx: int, dy: int) -> None:
    """Check the unpaired rows of both sides."""
    for side, rows, width in (("source", x, dx), ("target", y, dy)):
        if rows.ndim != 2 or rows.shape[1] != width or len(rows) < 2:
            raise ValueError(
                f"unpaired rows of the {side} must have shape (n, {width}) with n >= 2, got {tuple(rows.shape)}"
            )
        if not rows.is_floating_point():
            raise TypeError(f"unpaired rows of the {side} must be floating point, got {rows.dtype}")
        if not bool(rows.isfinite().all()):
            raise ValueError(f"unpaired rows of the {side} contain NaN or infinity; drop these rows")


def subsample(rows: Tensor, count: int, seed: int) -> Tensor:
    """Return at most ``count`` random rows on the CPU in float64."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]
    return rows.detach().cpu()[order].double()
