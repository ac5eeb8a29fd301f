"""Classes of data and of a network: matched by name, or a warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from datasets import ClassLabel, Dataset, Features, Value
from torch import nn

import hf_stitch
from hf_stitch.data import Samples
from hf_stitch.data.classes import numbered_as, warn_of_other_classes
from hf_stitch.training import StitchabilityCallback, TaskLoss

BY_NUMBER = "labels are compared by number"


class Named(nn.Module):
    """A classifier of unit vectors whose config names its classes: the vector of class i is the unit vector i."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.config = transformers.PreTrainedConfig(id2label=dict(enumerate(names)))
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, len(names))
        with torch.no_grad():
            self.body.weight.copy_(torch.eye(8))
            self.head.weight.copy_(10 * torch.eye(8)[: len(names)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def network(*names: str) -> hf_stitch.Adapter:
    return hf_stitch.load(Named(*names).eval(), example_inputs=torch.eye(8)[:2])


class Vectors(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Samples of classes in turn, each with a unit vector."""

    def __init__(self, names: list[str], samples: dict[str, int]) -> None:
        self.classes, self._samples = names, list(samples.items())

    def __len__(self) -> int:
        return 20 * len(self._samples)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        if place >= len(self):
            raise IndexError
        name, unit = self._samples[place % len(self._samples)]
        return torch.eye(8)[unit] + 1e-3 * place, self.classes.index(name)


def data(names: list[str], classes: list[str]) -> Dataset:
    """Samples of some classes, by name."""
    features = Features(text=Value("string"), label=ClassLabel(names=names))
    rows = {"text": classes * 20, "label": [names.index(name) for name in classes] * 20}
    return Dataset.from_dict(rows, features=features)


def config(*names: str) -> Any:
    return transformers.PreTrainedConfig(id2label=dict(enumerate(names)))


def told(samples: Samples, of: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_other_classes(numbered_as(samples, of), of)
    return [str(each.message) for each in found]


@pytest.mark.parametrize(
    ("names", "theirs", "numbers"),
    [
        (["bird", "cat", "dog"], ["dog", "cat"], [2, 1, 0]),  # the data have all names of the network
        (["cat", "dog"], ["dog", "bird", "CAT"], [2, 0]),  # the network has all names of the data
        (["cat", "bird", "dog", "ant"], ["dog", "cat"], [1, 2, 0, 3]),
    ],
)
def test_names_are_matched_if_one_side_has_all(names: list[str], theirs: list[str], numbers: list[int]) -> None:
    samples = Samples.of(data(names, names))
    (message,) = told(samples, config(*theirs))
    assert "matched by name" in message
    with pytest.warns(UserWarning, match="matched by name"):
        found = numbered_as(samples, config(*theirs))
        assert numbered_as(samples.select([1]), config(*theirs)).labels == numbers[1:2]  # classes may be absent
    assert found.labels == numbers * 20 and found.fingerprint == samples.fingerprint
    assert [found.label_names[number] for number in numbers] == [
        {"cat": next(t for t in theirs if t.lower() == "cat")}.get(name, name) for name in names
    ]


@pytest.mark.parametrize("theirs", [["cat", "dog"], ["cat", "dog", "bird"], ["Cat", "dog", "bird", "cow"]])
def test_names_in_the_same_order_need_no_word(theirs: list[str]) -> None:
    assert told(Samples.of(data(["cat", "dog", "bird"], ["cat", "dog"])), config(*theirs)) == []
    assert told(Samples.of(data(["cat", "dog"], ["cat", "dog"])), config(*theirs)) == []


@pytest.mark.parametrize("theirs", [["zebra", "ant", "cat"], ["pig", "cow", "ant"], ["a", "b"], ["a", "b", "c", "d"]])
def test_other_names_are_compared_by_number_with_a_warning(theirs: list[str]) -> None:
    samples = Samples.of(data(["dog", "cow", "pig"], ["dog", "cow", "pig"]))
    assert numbered_as(samples, config(*theirs)).labels == [0, 1, 2] * 20
    (message,) = told(samples, config(*theirs))
    assert BY_NUMBER in message and "dog, cow, pig" in message


PAIR = {"source_layer": "body", "target_layer": "body", "task": "image-classification", "progress": False}


@pytest.mark.parametrize("matcher", ["identity", TaskLoss(epochs=1, labels="hard", initial="identity", lr=1e-6)])
def test_a_superset_of_names_is_scored_by_name_and_a_class_of_its_own_refused(matcher: Any) -> None:
    net, names = network("dog", "cat"), ["bird", "cat", "dog"]
    with pytest.warns(UserWarning, match="matched by name"):
        made = hf_stitch.stitch(net, net, Vectors(names, {"dog": 0, "cat": 1}), matcher=matcher, **PAIR)
    assert made.evaluation is not None and made.evaluation.scores["target"]["accuracy"].value == 1
    with (
        pytest.warns(UserWarning, match="matched by name"),
        pytest.raises(ValueError, match="sample 2 has label 2, but the target predicts classes 0 to 1"),
    ):
        hf_stitch.evaluate(made, Vectors(names, {"dog": 0, "cat": 1, "bird": 1}), progress=False)


def test_every_verb_warns_of_other_classes() -> None:
    net = network("zebra", "ant", "cat")
    animals = Vectors(["dog", "cow", "pig"], {"dog": 0, "cow": 1, "pig": 2})
    with pytest.warns(UserWarning, match=BY_NUMBER):
        made = hf_stitch.stitch(net, net, animals, matcher="identity", **PAIR)
    fitted = hf_stitch.stitch(net, net, [vector for vector, _ in animals], matcher="ridge", **PAIR)
    grid = {"layers_a": ["body"], "layers_b": ["body"], "matchers": ["identity"], "task": "image-classification"}
    for verb in (
        lambda: hf_stitch.evaluate(made, animals, progress=False),
        lambda: hf_stitch.audit(made, animals, detectors=["knn"], progress=False),
        lambda: TaskLoss(max_steps=1, labels="hard").fit(fitted, animals, progress=False),
        lambda: hf_stitch.stitch_grid(net, net, animals, progress=False, **grid),
        lambda: StitchabilityCallback(net, animals, layers=["body"]).measure(network("a", "b", "c"), step=0),
    ):
        with pytest.warns(UserWarning, match=BY_NUMBER):
            verb()
