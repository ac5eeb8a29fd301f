"""Selection of anchors that are bootstrapped from a few parallel seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from hf_stitch.data import Id, Samples
from hf_stitch.options import Count
from hf_stitch.relative.projection import RelativeProjection, check_anchors
from hf_stitch.relative.selection import Selection


@dataclasses.dataclass(frozen=True, eq=False)
class Bootstrap(Selection):
    """Find the counterparts of another encoder's anchors from a few known pairs (Cannistraci et al. 2023, 2303.00721).

    Relative to the known pairs, the samples of both sides are comparable. Each anchor of the other side is assigned a
    sample of this side, no sample twice, such that the sum of squared distances between relative representations is
    minimal. The most reliable new pairs join the known ones, twice as many in each round, and all pairs except the
    seeds are reassigned, until all anchors are assigned and the assignment does not change.

    The paper optimises free vectors by gradient descent with a soft assignment from Sinkhorn's algorithm. Here each
    anchor is a sample, and the assignment is the exact limit of Sinkhorn's for temperature 0. If one side is a rotated,
    shifted and scaled copy of the other, the result is exact, provided that the seeds distinguish all samples.

    Attributes:
        anchors: ``(k, d)``: representations of the anchors by the other encoder, the seeds first.
        seeds: Ids of the counterparts of the first anchors on this side, in the same order; at least 3.
        rounds: Maximum number of reassignments once all anchors are assigned.

    Raises:
        ValueError: There are fewer than 3 seeds, not fewer seeds than anchors, or repeated seeds; or the anchors are
            invalid.
    """

    name: ClassVar[str] = "bootstrap"
    needs: ClassVar[Literal["labels", "features"] | None] = "features"

    anchors: Tensor
    seeds: Sequence[Id]
    rounds: Count = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_anchors(self.anchors)
        if not 3 <= len(self.seeds) < len(self.anchors) or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(
                f"bootstrap of {len(self.anchors)} anchors needs at least 3 different seeds, and fewer seeds "
                f"than anchors; got {len(self.seeds)}, of which {len(set(self.seeds))} differ"
            )

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """Select the anchors."""
        assert features is not None
        if count != len(self.anchors):
            raise ValueError(f"count must be {len(self.anchors)}, the number of anchors of the other side, got {count}")
        places = {id_: place for place, id_ in enumerate(samples.ids)}
        if unknown := [id_ for id_ in self.seeds if id_ not in places]:
            raise ValueError(f"{len(unknown)} seeds are not among the samples, the first {unknown[0]!r}")
        theirs = self.anchors.detach().to(features)
        pairs = torch.tensor([places[id_] for id_ in self.seeds])
        known = torch.arange(len(pairs))  # anchors of the other side with a counterpart so far
        left = self.rounds
        while left:
            assigned, margin = self._assigned(theirs, features, known, pairs)
            assigned[: len(self.seeds)], margin[: len(self.seeds)] = pairs[: len(self.seeds)], torch.inf
            if len(known) == count:
                left = 0 if torch.equal(assigned, pairs) else left - 1
            known = margin.topk(min(2 * len(known), count)).indices.sort().values
            pairs = assigned[known]
        return [int(place) for place in pairs]

    def _assigned(self, theirs: Tensor, ours: Tensor, known: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """The sample assigned to each anchor, and the distance ratio of the next best sample as a margin."""
        relative = [RelativeProjection.of(rows[of], center=True)(rows) for rows, of in ((theirs, known), (ours, pairs))]
        costs = torch.cdist(*relative).square()
        seeds = len(self.seeds)
        free = costs[seeds:].clone()
        free[:, pairs[:seeds]] = costs.max() + 1  # the counterparts of seeds are fixed
        _, columns = linear_sum_assignment(free.cpu().numpy())
        assigned = torch.cat([pairs[:seeds], torch.from_numpy(columns)])
        own = costs.gather(1, assigned[:, None].to(costs.device))
        others = costs.scatter(1, assigned[:, None].to(costs.device), torch.inf).min(1).values
        return assigned, (others / own[:, 0].clamp_min(torch.finfo(costs.dtype).tiny)).cpu()
