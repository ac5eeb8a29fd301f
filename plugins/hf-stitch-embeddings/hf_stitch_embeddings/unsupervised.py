"""Matcher that fits a map between two spaces without any pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from hf_stitch.matchers.base import NoAlignmentError, UnpairedMatcher
from hf_stitch.options import Count, Natural, Within
from hf_stitch.papers import Paper, arxiv
from hf_stitch.stitches import LinearStitch
from hf_stitch_embeddings.few_pairs import LAMPLE_2018, check_unpaired, orthogonal, refine, subsample, unit_rows
from hf_stitch_embeddings.row_matchers import moments_of

DAR_2025 = arxiv("Dar: mini-vec2vec: Scaling Universal Geometry Alignment with Linear Transformations", "2510.02348")

CYCLE = 0.6
"""Minimum mean cosine of rows and their round trip under two independently fitted maps."""
OVERLAP = 0.9
"""Minimum cosine of rows to the nearest mapped row, relative to the nearest row of the same space."""
SCOUTS = 2000
"""Rows of each side to refine and compare the candidates of each number of clusters."""
KMEANS = 4
"""Number of k-means starts; the best is used."""


@dataclass(frozen=True)
class Unsupervised(UnpairedMatcher):
    """Orthogonal map between two spaces from unpaired rows (after mini-vec2vec, Dar 2025).

    Rows are centred and divided by their lengths, and each side is split into random halves. From the first halves:

    1. k-means finds clusters on both sides. A quadratic assignment matches clusters by their mutual similarities; it is
       optimised by pairwise exchanges from hundreds of random starts.
    2. A map of the matched centres is refined by mutual neighbours, as in
       :class:`hf_stitch_embeddings.SeededRefinement`. This is repeated for several numbers of clusters and several
       starts of k-means, and the number with the best agreement between its maps is selected.
    3. The centres of the agreeing maps are the initial pairs to refine the map of all rows.

    A backward map is fitted in the same way to the second halves. The map is returned only if the round trip of both
    maps leads rows back to their origin (*cycle*), and if mapped rows lie among the rows of the opposite side
    (*overlap*, for both maps). Otherwise the spaces are unrelated, or have too few rows or clusters, and the fit raises
    :class:`hf_stitch.matchers.NoAlignmentError`. Symmetries of the data can pass both tests: parts of a map may be
    exchanged, and unrelated spaces with equally many tight clusters (two classifiers of ten different classes) are
    often accepted. Check the map with a few pairs.

    ``fitted`` contains ``n`` (mutual neighbours of the last fit), ``r2`` on these pairs (optimistic: they were selected
    to be near), ``cycle``, ``overlap``, the ``clusters`` and the ``stability`` (mean cosine of the agreeing maps) of
    the forward map, the ``rounds`` with all rows, and whether the pairs were ``stable`` at the end.

    Attributes:
        clusters: Number of clusters, or several numbers to try.
        starts: Starts of k-means for each number of clusters, at least 2.
        restarts: Random starts of an assignment.
        neighbours: Number of neighbours of CSLS.
        iterations: Rounds with random halves of the rows, and maximum number of rounds with all rows.
        rows: Maximum number of rows of each side; larger sets are subsampled.
        seed: Seed of all random draws.

    Raises:
        ValueError: If ``clusters`` is empty or exceeds a quarter of ``rows``.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> centres, turn = torch.randn(8, 6, generator=g), torch.linalg.qr(torch.randn(6, 6, generator=g)).Q
        >>> of = [torch.randint(8, (400,), generator=g) for _ in "xy"]
        >>> x, y = (centres[each] + 0.2 * torch.randn(400, 6, generator=g) for each in of)
        >>> stitch = Unsupervised(clusters=(8,), starts=3).fit(x, y @ turn)
        >>> torch.cosine_similarity(stitch(x), x @ turn).mean() > 0.95
        tensor(True)
    """

    name: ClassVar[str] = "unsupervised"
    title: ClassVar[str] = "an orthogonal map without pairs"
    papers: ClassVar[tuple[Paper, ...]] = (DAR_2025, LAMPLE_2018)

    clusters: tuple[Annotated[int, Within(3)], ...] = (10, 15, 20, 30)
    starts: Annotated[int, Within(2)] = 6
    restarts: Count = 300
    neighbours: Count = 10
    iterations: Count = 20
    rows: Count = 10_000
    seed: Natural = 0

    def __post_init__(self) -> None:
        clusters: Any = self.clusters  # one, or a list of JSON
        clusters = tuple(clusters) if isinstance(clusters, list | tuple) else (clusters,)
        object.__setattr__(self, "clusters", clusters)
        super().__post_init__()
        if not clusters or self.rows < 4 * max(clusters):
            raise ValueError(
                f"clusters must not be empty, and rows must be at least 4 times the largest number of clusters, got "
                f"clusters={clusters} and rows={self.rows}"
            )

    @torch.no_grad()
    def fit(
        self, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32, *, unpaired: tuple[Tensor, Tensor] | None = None
    ) -> LinearStitch:
        """Fit the map in float64, with a neighbour search in float32."""
        if unpaired is not None:
            check_unpaired(*unpaired, x.shape[-1], y.shape[-1])
            x, y = torch.cat([x, unpaired[0]]), torch.cat([y, unpaired[1]])
        check_unpaired(x, y, x.shape[-1], y.shape[-1])
        min_rows = 4 * max(self.clusters)
        for side, rows in (("source", x), ("target", y)):
            if len(rows) < min_rows:
                raise ValueError(
                    f"{max(self.clusters)} clusters require at least {min_rows} rows of the {side}, got {len(rows)}; "
                    "pass more rows or fewer clusters"
                )
            if bool((rows == rows[0]).all()):
                raise ValueError(f"all {len(rows)} rows of the {side} are equal: pass different rows")
        x, y = (subsample(rows, self.rows, self.seed + side) for side, rows in enumerate((x, y)))
        u, v = (unit_rows(rows - rows.mean(0)).float() for rows in (x, y))
        (u_first, u_second), (v_first, v_second) = u.chunk(2), v.chunk(2)
        forward = self._fit_candidate(u_first, v_first, self.seed)
        backward = self._fit_candidate(v_second, u_second, self.seed + len(self.clusters) * self.starts)
        cycle, overlap = _cycle(u, v, forward.map, backward.map), _overlap(u, v, forward.map, backward.map)
        if cycle < CYCLE or overlap < OVERLAP:
            raise NoAlignmentError(
                f"the two spaces could not be aligned: cycle {cycle:.2f} (at least {CYCLE:.2f} required: similarity "
                f"after a round trip), overlap {overlap:.2f} (at least {OVERLAP:.2f} required: similarity of mapped "
                f"rows to the opposite side). The spaces are unrelated, or {len(u)} and {len(v)} rows are too few; a "
                "few pairs with 'seeded_refinement' help more than many rows"
            )
        refinement = refine(forward.pairs, u, v, neighbours=self.neighbours, iterations=self.iterations, seed=self.seed)
        stitch = orthogonal(moments_of(x[refinement.x], y[refinement.y]), x, y, dtype)
        stitch.fitted |= {
            "cycle": cycle, "overlap": overlap, "clusters": forward.clusters, "stability": forward.stability,
            "rounds": refinement.rounds, "stable": refinement.stable,
        }  # fmt: skip
        return stitch

    def _fit_candidate(self, x: Tensor, y: Tensor, seed: int) -> _Candidate:
        """Fit the map of unit rows, with the number of clusters of the best agreement between maps."""
        best: tuple[float, int, tuple[Tensor, Tensor]] | None = None
        scout_rows = x[:SCOUTS], y[:SCOUTS]
        for position, count in enumerate(self.clusters):
            first_seed = seed + position * self.starts
            centre_pairs = [self._match_clusters(x, y, count, first_seed + start) for start in range(self.starts)]
            maps = [self._refine_pairs(pairs, *scout_rows, first_seed, whole=False)[1] for pairs in centre_pairs]
            mapped_rows = torch.stack([unit_rows(scout_rows[0] @ rotation) for rotation in maps])
            agreement = torch.einsum("ind,jnd->ij", mapped_rows, mapped_rows) / len(scout_rows[0])
            central = agreement.sum(1).argmax()
            nearest = agreement[central].topk(self.starts // 2 + 1).indices
            stability = agreement[central, nearest[nearest != central]].mean().item()
            if best is None or stability > best[0]:
                x_centres, y_centres = zip(*(centre_pairs[i] for i in nearest.tolist()), strict=True)
                best = stability, count, (torch.cat(x_centres), torch.cat(y_centres))
        assert best is not None
        pairs, rotation = self._refine_pairs(best[2], x, y, seed, whole=True)
        return _Candidate(pairs, rotation, best[1], best[0])

    def _refine_pairs(
        self, pairs: tuple[Tensor, Tensor], x: Tensor, y: Tensor, seed: int, *, whole: bool
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return refined pairs and their orthogonal map."""
        iterations = self.iterations if whole else max(1, self.iterations // 2)
        refinement = refine(pairs, x, y, neighbours=self.neighbours, iterations=iterations, seed=seed, whole=whole)
        pairs = x[refinement.x], y[refinement.y]
        left, _, right = torch.linalg.svd(pairs[0].T @ pairs[1], full_matrices=False)
        return pairs, left @ right

    def _match_clusters(self, x: Tensor, y: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Cluster both sides, match the clusters, and return the paired centres."""
        from sklearn.cluster import KMeans

        centres = [
            torch.from_numpy(KMeans(count, n_init=KMEANS, random_state=seed).fit(rows.numpy()).cluster_centers_)
            for rows in (x, y)
        ]
        x_cosines, y_cosines = map(_standardise_similarities, centres)
        permutation, _ = match_by_similarity(x_cosines, y_cosines, self.restarts, seed)
        return centres[0], centres[1][permutation]


@dataclass(frozen=True)
class _Candidate:
    """Map fitted to unit rows."""

    pairs: tuple[Tensor, Tensor]  # the paired rows of both sides
    map: Tensor  # (dx, dy) (semi-)orthogonal
    clusters: int  # selected number of clusters
    stability: float  # mean cosine of the agreeing maps


def match_by_similarity(a: Tensor, b: Tensor, restarts: int, seed: int) -> tuple[Tensor, float]:
    """Return the permutation p that maximises ``Σ a[i, j] b[p[i], p[j]]``, by pairwise exchanges from random starts.

    All starts advance in parallel, each by its best exchange, until no exchange improves the sum.
    """
    generator = torch.Generator().manual_seed(seed)
    a, b = a.double(), b.double()
    permutations = torch.stack([torch.randperm(len(a), generator=generator) for _ in range(restarts)])
    first, second = torch.triu_indices(len(a), len(a), 1)
    active, tolerance = torch.arange(restarts), 1e-9 * float(a.abs().sum() * b.abs().max())
    while len(active):
        current = permutations[active]
        permuted_b = b[current[:, :, None], current[:, None, :]]
        products = a @ permuted_b
        aligned = products.diagonal(dim1=1, dim2=2)
        a_ii, b_ii = a.diagonal(), permuted_b.diagonal(dim1=1, dim2=2)
        gain = products + products.mT - aligned[:, :, None] - aligned[:, None, :]
        # Subtract the terms of the two exchanged clusters, which the products include.
        gain -= (a_ii[:, None] - a) * (permuted_b - b_ii[:, :, None]) + (a - a_ii) * (b_ii[:, None, :] - permuted_b)
        gain = 2 * gain + (a_ii[:, None] - a_ii) * (b_ii[:, None, :] - b_ii[:, :, None])
        best, exchange = gain[:, first, second].max(1)
        improved = best > tolerance
        active, i, j = active[improved], first[exchange[improved]], second[exchange[improved]]
        permutations[active, i], permutations[active, j] = permutations[active, j], permutations[active, i]
    sums = (a * b[permutations[:, :, None], permutations[:, None, :]]).sum((1, 2))
    return permutations[sums.argmax()], sums.max().item()


def _standardise_similarities(centres: Tensor) -> Tensor:
    """Return the cosines between centred centres, standardised to mean 0 and variance 1, with a zero diagonal."""
    rows = unit_rows(centres - centres.mean(0))
    cosines, off_diagonal = rows @ rows.T, ~torch.eye(len(rows), dtype=torch.bool)
    standardised = (cosines - cosines[off_diagonal].mean()) / cosines[off_diagonal].std().clamp_min(1e-12)
    return standardised.fill_diagonal_(0)


def _cycle(x: Tensor, y: Tensor, forward: Tensor, backward: Tensor) -> float:
    """Return the mean cosine of rows of the narrower side with their round trip."""
    rows, there, back = (x, forward, backward) if x.shape[1] <= y.shape[1] else (y, backward, forward)
    return (rows * unit_rows(rows @ there @ back)).sum(1).mean().item()


def _overlap(x: Tensor, y: Tensor, forward: Tensor, backward: Tensor) -> float:
    """Return the similarity of rows to mapped rows, relative to rows of the same side: the minimum over both sides."""
    ratios = []
    for rows, mapped in ((y, unit_rows(x @ forward)), (x, unit_rows(y @ backward))):
        count = min(len(rows) // 2, len(mapped), SCOUTS)
        queries, same_side, mapped_rows = rows[:count], rows[count : 2 * count], mapped[-count:]
        to_mapped, to_same_side = ((queries @ targets.T).amax(1).mean() for targets in (mapped_rows, same_side))
        ratios.append((to_mapped / to_same_side).item())
    return min(ratios)
