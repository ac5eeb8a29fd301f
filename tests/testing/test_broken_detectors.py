"""Detectors and rewrites that break one promise fail the part that checks it, and no other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

import pytest
import torch
from failing_parts import assert_fails_only, failing, names
from torch import Tensor, nn

from hf_stitch.adapters.rewriting import Rewrite
from hf_stitch.detectors import Detector, Scorer
from hf_stitch.registry import Entry, registries
from hf_stitch.representation import Representation
from hf_stitch.testing import check_detector, check_rewrite


@dataclass(frozen=True)
class Distance(Detector):
    """The distance from the mean, with a defect to choose."""

    name: ClassVar[str] = "distance"
    title: ClassVar[str] = "distance"
    reads: ClassVar[Any] = "samples"
    needs_labels: ClassVar[bool] = True
    defect: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name} if self.defect == "config" else super().to_dict()

    def fit(self, activations: Iterable[Representation], *args: Any, **kwargs: Any) -> Scorer:
        if self.defect == "needs":
            kwargs.setdefault("labels", [place % 3 for place in range(96)])
        return super().fit(activations, *args, **kwargs)

    def _fit(self, activations: Iterable[Representation], *args: Any, **kwargs: Any) -> Scorer:
        batches = [batch.rows("mean").double() for batch in activations]
        if self.defect == "random_state":
            torch.rand(1)
        mean = torch.cat(batches).mean(0) + (0.1 if self.defect == "batches" and len(batches) > 1 else 0)
        return Distances(mean, self.defect)


class Distances(Scorer):
    def __init__(self, mean: Tensor, defect: str) -> None:
        self.mean, self.defect = mean, defect

    def score(self, activations: Representation) -> Tensor:
        rows = activations.rows("mean").double()
        if rows.shape[1] != len(self.mean):
            if self.defect == "width":
                raise ValueError("wrong width")
            raise ValueError(f"fitted to width {len(self.mean)}, got {rows.shape[1]}")
        scores = (rows - self.mean).norm(dim=1)
        if self.defect == "independent" and len(rows) < 96:
            scores = scores + 1e-3
        if self.defect == "scores":
            scores = scores.float()
        return -scores if self.defect == "far" else scores


DETECTORS = {
    "config": "built from its own record, it is",
    "needs": "missing labels must raise ValueError",
    "scores": "scores must be float64, got torch.float32",
    "independent": "must not depend on the other samples",
    "batches": "in other batches, it scores bd differently",
    "random_state": "must not change torch's random state",
    "far": "far samples must score higher than known ones",
    "width": "must name 5 and 7: wrong width",
}


@pytest.mark.parametrize("part", DETECTORS)
def test_a_detector_fails_only_the_part_that_it_violates(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setitem(registries.detectors._entries, "distance", Entry.of("distance", Distance))
    assert failing(check_detector, Distance()) == {}
    assert_fails_only(part, DETECTORS[part], check_detector, Distance(part))


class Doubled(nn.Module):
    def __init__(self, like: nn.Module, dtype: torch.dtype | None = None, device: Any = None, defect: str = "") -> None:
        super().__init__()
        self.inner, self.defect = like, defect
        weight = next(like.parameters())
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype or weight.dtype, device=device or weight.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = Doubled(
            nn.Linear(2, 2) if self.defect == "copied" else self.inner, self.scale.dtype, self.scale.device
        )
        memo[id(self)] = copied
        return copied


@dataclass(frozen=True)
class Doubling(Rewrite):
    """Wraps the first layer, with a defect to choose."""

    name: ClassVar[str] = "doubling"
    defect: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name} if self.defect == "config" else super().to_dict()

    def apply(self, model: nn.Module) -> None:
        layer: Any = model.get_submodule("0")
        if self.defect == "changes":
            return
        if self.defect == "values" and not layer.weight.is_meta and layer.weight.sum() < 0:
            model.set_submodule("1", nn.Identity())
        dtype = torch.float32 if self.defect == "dtype" else None
        device = "cpu" if self.defect == "weightless" else None
        model.set_submodule("0", Doubled(layer, dtype, device, self.defect))


REWRITES = {
    "config": "built from its own record, it is",
    "recorded": "the network must record",
    "changes": "it must change modules or tensors",
    "copied": "a copy of the rewritten network must equal it",
    "values": "with other values of the weights",
    "dtype": "must be float64, got torch.float32",
    "weightless": "tensors must be on the device of the network, but not 0.scale",
}


def network() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    with torch.no_grad():
        made[0].weight.fill_(1)
    return made


@pytest.mark.parametrize("part", [part for part in REWRITES if part != "recorded"])
def test_a_rewrite_fails_only_the_part_that_it_violates(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setitem(registries.rewrites._entries, "doubling", Entry.of("doubling", Doubling))
    assert failing(check_rewrite, Doubling(), network()) == {}
    assert_fails_only(part, REWRITES[part], check_rewrite, Doubling(part), network())


def test_a_rewrite_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registries.rewrites._entries, "doubling", Entry.of("doubling", Doubling))
    numbers = count()
    monkeypatch.setattr(Doubling, "to_dict", lambda self: {"name": "doubling", "defect": str(next(numbers))})
    found = failing(check_rewrite, Doubling(), network())  # a record that changes cannot rebuild it either
    assert list(found) == ["config", "recorded"] and REWRITES["recorded"] in found["recorded"]


def test_every_part_can_fail() -> None:
    assert set(DETECTORS) == names(check_detector, Distance())
    assert set(REWRITES) == names(check_rewrite, Doubling(), network())
