"""A map from few pairs and many rows without partners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hf_stitch.matchers._mutual import refined, span, unit
from hf_stitch.matchers._rows import check_unpaired, moments_of, orthogonal, some_rows
from hf_stitch.matchers._solve import require
from hf_stitch.matchers.base import NoAlignmentError, UnpairedMatcher
from hf_stitch.options import Count, Natural, Within
from hf_stitch.papers import LAMPLE_2018, Paper
from hf_stitch.stitches import LinearStitch

FOLDS = 10
"""Parts of the seeds, each of which is searched under the map of the others."""
CHANCE = 3.0
"""Standard errors of independent ranks by which seeds that are left out must be found better than by chance. Ranks of
seeds depend on each other, so that unrelated rows differ by 1.3 to 1.5 of them."""


@dataclass(frozen=True)
class SeededRefinement(UnpairedMatcher):
    """Procrustes on few pairs, then on rows that are each other's nearest neighbours under it, and so on.

    The pairs (*seeds*) stay, and rows without partners are added that are mutual neighbours by CSLS
    (Lample et al. 2018). A map of few seeds is used only in the directions that they span; the result is the orthogonal
    map of all pairs (:class:`Procrustes`), with the means of all rows, scaled so that mapped rows vary as much as those
    of the target.

    With hundreds of pairs, and rows of which none has a partner, :class:`Procrustes` on the pairs alone is better:
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
