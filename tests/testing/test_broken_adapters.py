"""Adapters and overrides that break one promise fail the part that checks it, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from failing_parts import assert_fails_only, failing, names
from torch import Tensor, nn

import hf_stitch
from hf_stitch.adapters import Override
from hf_stitch.testing import check_adapter, check_override, parametrize_with_checks


class Net(nn.Module):
    """Two layers, and a sum with a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.second = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, pairs: Tensor) -> Tensor:
        x = self.first(pairs)
        return self.second((x + self.branch(x)).relu())


def adapter() -> Any:
    return hf_stitch.load(Net(), example_inputs={"pairs": torch.randn(2, 4)})


BATCHES = [{"pairs": torch.randn(3, 4)}, {"pairs": torch.randn(5, 4)}]


class Broken:
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
    "verified": "first is listed and must be a cut",
    "spec": "first: spec must be",
    "alone": "encoding it alone and with other layers must agree",
    "exact": "must equal the output of the model",
    "context": "the context must not contain pairs",
    "halves": "the back half must give the output of the model",
    "size": "halves must not be larger than the model",
    "hooks": "halves must have no hooks",
    "not_a_cut": "an unknown layer must raise NotACutError",
    "unmodified": "values of the model must not be modified",
}


@pytest.mark.parametrize("part", ADAPTERS)
def test_an_adapter_fails_only_the_part_that_it_violates(part: str) -> None:
    assert failing(check_adapter, Broken(""), *BATCHES) == {}
    assert_fails_only(part, ADAPTERS[part], check_adapter, Broken(part), *BATCHES)


@parametrize_with_checks(check_adapter, adapter(), *BATCHES)
def test_an_adapter_conforms(check: Any) -> None:
    check()


class ForNet(Override):
    """What a trace of the network does not reveal."""

    def example(self, model: nn.Module) -> Any:
        return {"pairs": torch.randn(2, 4)}

    def blocks(self, model: nn.Module) -> Any:
        return ("first",)


class NeedsArguments(ForNet):
    def __init__(self, width: int) -> None:
        self.width = width


class Remembers(ForNet):
    def blocks(self, model: nn.Module) -> Any:
        self.model = model
        return super().blocks(model)


class Trains(ForNet):
    def special_ids(self, model: nn.Module) -> tuple[int, ...]:
        model.train(not model.training)
        return ()


class Grows(ForNet):
    counted = 1

    def example(self, model: nn.Module) -> Any:
        Grows.counted += 1
        return {"pairs": torch.randn(Grows.counted, 4)}


class Same(nn.Module):
    """A network whose only block is bypassed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, pairs: Tensor) -> Tensor:
        return self.first(pairs) + pairs


def override(**changes: Any) -> Override:
    kind: Any = type("Changed", (ForNet,), changes)
    return kind()


OVERRIDES: dict[str, tuple[Override, str]] = {
    "config": (NeedsArguments(3), "NeedsArguments must need no arguments"),
    "stateless": (Remembers(), "it stores model"),
    "pure": (Trains(), "must not modify the network"),
    "options": (override(options={"pairs": {1, 2}}), "options must be JSON values"),
    "example": (Grows(), "examples must be alike"),
    "special_ids": (override(special_ids=lambda self, model: (-1,)), "must be a tuple of integers >= 0"),
}


@pytest.mark.parametrize("part", OVERRIDES)
def test_an_override_fails_the_part_that_it_violates(part: str) -> None:
    made, message = OVERRIDES[part]
    found = failing_before_load(made)
    assert list(found) == [part] and message in found[part], found


def failing_before_load(made: Override, model: nn.Module | None = None) -> dict[str, str]:
    """Messages of the parts that fail before the network is loaded with the override, which needs all of them."""
    found = {}
    for part in check_override.parts(made, Net() if model is None else model)[:-2]:
        try:
            part()
        except AssertionError as error:
            found[part.name] = str(error)
    return found


def test_an_override_whose_example_does_not_run() -> None:
    made = override(example=lambda self, model: {"pairs": torch.randn(2, 7)})
    found = failing_before_load(made)
    assert list(found) == ["runs"] and "the network must run on the example and the options (pairs)" in found["runs"]


def test_an_override_whose_blocks_do_not_exist() -> None:
    found = failing_before_load(override(blocks=lambda self, model: ("frist",)))
    assert found == {"blocks": "the network has no module 'frist'; did you mean 'first'?"}


def test_an_override_without_a_cut() -> None:
    made = override(blocks=lambda self, model: ("first",))
    parts = {part.name: part for part in check_override.parts(made, Same())}
    with pytest.raises(AssertionError, match="the network must have a cut"):
        parts["cuts"]()


def test_an_override_whose_batches_contradict_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_stitch.Adapter, "decode", lambda self, representation, layer: torch.zeros(1))
    found = failing(check_override, ForNet(), Net(), *BATCHES)
    assert list(found) == ["exact"] and "must equal the output of the model" in found["exact"]


def test_every_part_can_fail() -> None:
    assert set(ADAPTERS) == names(check_adapter, adapter())
    assert {*OVERRIDES, "runs", "blocks", "cuts", "exact"} == names(check_override, ForNet(), Net())


def test_an_override_is_registered_only_while_it_is_checked() -> None:
    before = dict(hf_stitch.registries.overrides._entries)
    assert failing(check_override, ForNet(), Net(), *BATCHES) == {}
    check_override(ForNet(), Net())
    assert hf_stitch.registries.overrides._entries == before
