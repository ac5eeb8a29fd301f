"""Anchors that are grown from a few parallel ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from hf_stitch.data import Id, Samples
from hf_stitch.relative.projection import RelativeProjection, check_anchors
from hf_stitch.relative.selection import Selection


@dataclasses.dataclass(frozen=True, eq=False)
class Bootstrap(Selection):
    """The counterparts of another encoder's anchors, of which a few are known (Cannistraci et al. 2023, 2303.00721).

    Relative to the known pairs, both sides' samples are comparable: every anchor of the other side is assigned the
    sample of this side whose relative representation is nearest, no sample twice, such that the sum of squared
    distances is least. The clearest of the new pairs join the known ones, twice as many each time, and all but the
    seeds are assigned anew, until all anchors are in and the assignment stays.

    The paper moves free vectors by gradient, under an assignment that Sinkhorn's algorithm makes soft; here an anchor
    is a sample, and the assignment the exact one that Sinkhorn's tends to as its temperature goes to 0. Where one side
    is the other turned, shifted and scaled, it is found exactly from as many seeds as make the samples differ.

    Attributes:
        anchors: ``(k, d)``: the anchors as the other encoder represents them, the seeds first.
        seeds: Ids of this side's counterparts of the first of them, in their order; at least 3.
        rounds: How often all anchors are assigned anew at most, once all are in.

    Raises:
        ValueError: There are fewer than 3 seeds, as many as anchors or more, or one twice; or the anchors will not do.
    """

    name: ClassVar[str] = "bootstrap"
    needs: ClassVar[Literal["labels", "features"] | None] = "features"

    anchors: Tensor
    seeds: Sequence[Id]
    rounds: int = 10

    def __post_init__(self) -> None:
        check_anchors(self.anchors)
        if not 3 <= len(self.seeds) < len(self.anchors) or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(
                f"bootstrap grows {len(self.anchors)} anchors from at least 3 seeds, each another sample, and fewer "
                f"than there are anchors; got {len(self.seeds)}, of which {len(set(self.seeds))} differ"
            )
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """As in ``Selection``.

        Raises:
            ValueError: The number is not that of the other side's anchors, or a seed is not among the samples.
        """
        assert features is not None
        if count != len(self.anchors):
            raise ValueError(f"the other side has {len(self.anchors)} anchors, and {count} counterparts are wanted")
        places = {id_: place for place, id_ in enumerate(samples.ids)}
        if unknown := [id_ for id_ in self.seeds if id_ not in places]:
            raise ValueError(f"{len(unknown)} seeds are not among the samples, the first {unknown[0]!r}")
        theirs = self.anchors.detach().to(features)
        pairs = torch.tensor([places[id_] for id_ in self.seeds])
        known = torch.arange(len(pairs))  # of their anchors, those that have a counterpart so far
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
        """The sample assigned to each of their anchors, and by how much the next best is farther, as a ratio."""
        relative = [RelativeProjection.of(rows[of], center=True)(rows) for rows, of in ((theirs, known), (ours, pairs))]
        costs = torch.cdist(*relative).square()
        seeds = len(self.seeds)
        free = costs[seeds:].clone()
        free[:, pairs[:seeds]] = costs.max() + 1  # a seed's counterpart is taken
        _, columns = linear_sum_assignment(free.cpu().numpy())
        assigned = torch.cat([pairs[:seeds], torch.from_numpy(columns)])
        own = costs.gather(1, assigned[:, None].to(costs.device))
        others = costs.scatter(1, assigned[:, None].to(costs.device), torch.inf).min(1).values
        return assigned, (others / own[:, 0].clamp_min(torch.finfo(costs.dtype).tiny)).cpu()
