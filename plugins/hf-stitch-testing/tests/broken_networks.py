"""Adapters, overrides and rewrites with one defect each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

import torch
from broken import Broken, WithDefect
from hf_stitch_testing import check_adapter, check_override, check_rewrite
from torch import Tensor, nn

import hf_stitch
from hf_stitch.adapters import Override
from hf_stitch.adapters.rewriting import Rewrite
from hf_stitch.registry import registries


class Net(nn.Module):
    """Two layers, and a sum with a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.second = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, pairs: Tensor) -> Tensor:
        x = self.first(pairs)
        return self.second((x + self.branch(x)).relu())


NUMBERS = count(1)
BATCHES = [{"pairs": torch.randn(3, 4)}, {"pairs": torch.randn(5, 4)}]


def adapter() -> Any:
    return hf_stitch.load(Net(), example_inputs={"pairs": torch.randn(2, 4)})


class Defective:
    """An adapter with a defect in front of one that conforms."""

    def __init__(self, defect: str) -> None:
        self._own, self._defect = adapter(), defect

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    @property
    def layers(self) -> tuple[str, ...]:
        return self._own.layers * (2 if self._defect == "layers" else 1)

    def encode(self, inputs: Any, layers: Any) -> Any:
        if self._defect == "not_a_cut" and layers == "no.such.layer":
            return {}
        found = self._own.encode(inputs, layers)
        if self._defect == "alone" and isinstance(layers, str):
            return {name: each.replace(values=each.values + 1) for name, each in found.items()}
        if self._defect == "context" and not isinstance(layers, str):
            return {name: each.replace(context={**each.context, **inputs}) for name, each in found.items()}
        return found

    def verify_cut(self, layer: str) -> Any:
        return self._own.verify_cut("branch" if self._defect == "verified" else layer)

    def spec(self, layer: str) -> Any:
        found = self._own.spec(layer)
        return type(found)(**{**vars(found), "width": 9}) if self._defect == "spec" else found

    def decode(self, representation: Any, layer: str) -> Any:
        if self._defect == "unmodified":
            with torch.no_grad():
                self._own.model.first.weight.add_(0)
        return self._own.decode(representation, layer) + (self._defect == "exact")

    def front(self, layer: str) -> Any:
        half = self._own.front(layer)
        if self._defect == "hooks":
            half.register_forward_hook(lambda *_: None)
        if self._defect == "size":
            half.extra = nn.Parameter(torch.zeros(999))
        return half

    def back(self, layer: str) -> Any:
        half = self._own.back(layer)
        return Late(half) if self._defect == "halves" else half


class Late(nn.Module):
    def __init__(self, half: nn.Module) -> None:
        super().__init__()
        self.part = half

    def forward(self, *args: Any) -> Any:
        return self.part(*args) + 1


ADAPTERS = {
    "layers": "layers must be distinct names",
    "verified": "listed layer first must be a cut",
    "spec": "first: spec must be",
    "alone": "joint and separate encoding must agree",
    "exact": "must equal the output of the model",
    "context": "the context must not contain pairs",
    "halves": "the back half must return the output of the model",
    "size": "halves must not be larger than the model",
    "hooks": "halves must not have hooks",
    "not_a_cut": "an unknown layer must raise NotACutError",
    "unmodified": "values of the model must not be modified",
}


class ForNet(Override):
    """What a trace of the network does not reveal."""

    def example(self, model: nn.Module) -> Any:
        return {"pairs": torch.randn(2, 4)}

    def blocks(self, model: nn.Module) -> Any:
        return ("first",)


def override(changes: dict[str, Any]) -> Override:
    kind: Any = type("Changed", (ForNet,), changes)
    return kind.__new__(kind)  # its constructor may have a defect, too


OVERRIDES: dict[str, tuple[dict[str, Any], str]] = {
    "config": ({"__init__": lambda self, width: None}, "Changed must not require arguments"),
    "stateless": ({"blocks": lambda self, model: setattr(self, "model", model)}, "it stores model"),
    "pure": ({"blocks": lambda self, model: model.train(not model.training) and None}, "must not modify the network"),
    "options": ({"options": {"pairs": {1, 2}}}, "options must be JSON values"),
    "example": (
        {"example": lambda self, model: {"pairs": torch.randn(next(NUMBERS), 4)}},
        "examples must have equal shapes",
    ),
    "runs": (
        {"example": lambda self, model: {"pairs": torch.randn(2, 7)}},
        r"the network must run on the example and the options \(pairs\), got RuntimeError",
    ),
    "special_ids": ({"special_ids": lambda self, model: (-1,)}, "must be a tuple of integers >= 0"),
    "blocks": (
        {"blocks": lambda self, model: ("frist",)},
        r"^blocks must be modules of the network, got 'frist'; did you mean 'first'\?$",
    ),
}


@dataclass(frozen=True)
class Doubling(WithDefect, Rewrite):
    """Wraps the first layer, with a defect to choose."""

    name: ClassVar[str] = "doubling"

    def to_dict(self) -> dict[str, Any]:
        changes = {"defect": str(next(NUMBERS))} if self.defect == "recorded" else {}
        return super().to_dict() | changes

    def apply(self, model: nn.Module) -> None:
        layer: Any = model.get_submodule("0")
        if self.defect == "changes":
            return
        if self.defect == "values" and not layer.weight.is_meta and layer.weight.sum() < 0:
            model.set_submodule("1", nn.Identity())
        dtype = torch.float32 if self.defect == "dtype" else None
        device = "cpu" if self.defect == "weightless" else None
        model.set_submodule("0", Doubled(layer, dtype, device, self.defect))


class Doubled(nn.Module):
    def __init__(self, like: nn.Module, dtype: torch.dtype | None = None, device: Any = None, defect: str = "") -> None:
        super().__init__()
        self.inner, self.defect = like, defect
        weight = next(like.parameters())
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype or weight.dtype, device=device or weight.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        inner = nn.Linear(2, 2) if self.defect == "copied" else self.inner
        memo[id(self)] = Doubled(inner, self.scale.dtype, self.scale.device)
        return memo[id(self)]


REWRITES = {
    "config": "must rebuild",
    "recorded": "the network must record",
    "changes": "the rewrite must change modules or tensors",
    "copied": "a copy of the rewritten network must equal it",
    "values": "with different values of the weights",
    "dtype": "must be float64, got torch.float32",
    "weightless": "tensors must be on the device of the network; elsewhere: 0.scale",
}


def network() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    with torch.no_grad():
        made[0].weight.fill_(1)
    return made


TABLES = [
    Broken(check_adapter, lambda part: (Defective(part), *BATCHES), ADAPTERS),
    Broken(
        check_override,
        lambda part: (override(OVERRIDES[part][0]) if part else ForNet(), Net()),
        {part: message for part, (_, message) in OVERRIDES.items()},
        also={part: {"cuts", "exact"} for part in ("config", "runs", "blocks")},
    ),
    Broken(
        check_rewrite,
        lambda part: (Doubling(part), network()),
        REWRITES,
        registries.rewrites,
        also={"recorded": {"config"}},  # a record that changes cannot rebuild it either
    ),
]
