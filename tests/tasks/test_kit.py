"""Every built-in task passes the conformance checks; so does a task of a plugin, which every verb asks."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers
from test_masked import TEXTS as MASKED_TEXTS
from test_masked import network as masked_network
from tiny_networks import TEXT, WORDS, adapted, build

import hf_stitch
from hf_stitch.data import Samples
from hf_stitch.registry import Entry, registries
from hf_stitch.tasks.base import Array
from hf_stitch.tasks.classification import TextClassification
from hf_stitch.testing import Part, check_task

TEXTS = [" ".join((WORDS * 3)[i : i + 2 + i % 5]) for i in range(20)]
NAMES = ("O", "B-x", "I-x")
LABELS: dict[str, Any] = {
    "token-classification": [[(i + j) % 3 for j in range(len(text.split()))] for i, text in enumerate(TEXTS)],
    "text-classification": [i % 2 for i in range(20)],
    "regression": [i / 7 for i in range(20)],
    "multi-label-classification": [[i % 2, i % 3 > 0, 1] for i in range(20)],
}


def bert(head: str = "BertForSequenceClassification", **options: Any) -> hf_stitch.Adapter:
    torch.manual_seed(0)
    return adapted("bert", getattr(transformers, head)(transformers.BertConfig(**TEXT, **options)).eval())


def case(name: str) -> tuple[hf_stitch.Adapter, Samples]:
    """A network with the head of a task, and data for it."""
    torch.manual_seed(3)
    if name == "image-classification":
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        images = torch.randn(20, 3, 2, 2, generator=torch.Generator().manual_seed(0))
        return hf_stitch.load(net, example_inputs=images[:2]), Samples.of(images, label=[i % 3 for i in range(20)])
    network = {
        "feature-extraction": lambda: bert("BertModel"),
        "text-classification": bert,
        "text-generation": lambda: adapted("llama", build("llama", 0)),
        "token-classification": lambda: bert("BertForTokenClassification", id2label=dict(enumerate(NAMES))),
        "fill-mask": masked_network,
        "regression": lambda: bert(num_labels=1),
        "multi-label-classification": lambda: bert(num_labels=3, problem_type="multi_label_classification"),
    }[name]()
    labels = [[*map(int, each)] if isinstance(each, list) else each for each in LABELS.get(name, ())]
    return network, Samples.of(MASKED_TEXTS if name == "fill-mask" else TEXTS, label=labels or None)


@pytest.mark.parametrize(
    "part", [part for name in registries.tasks for part in check_task.parts(registries.tasks.build(name), *case(name))],
    ids=str,
)  # fmt: skip
def test_built_in_tasks_conform(part: Part) -> None:
    part()


def test_a_task_of_a_plugin_is_one_class_that_every_verb_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranked(TextClassification):
        """Classification that counts the two best classes."""

        name = "ranked"
        heads = ()
        figures: ClassVar[dict[str, bool]] = {"hit_rate": True, **TextClassification.figures}
        compared = ("hit_rate", "agreement")

        def figures_of(self, own: Any, target: Any, weights: Array) -> dict[str, Array]:
            found = super().figures_of(own, target, weights)
            return {"hit_rate": np.ones_like(found["agreement"]), **found}

    monkeypatch.setitem(registries.tasks._entries, "ranked", Entry.of("ranked", Ranked))
    network, data = case("text-classification")
    layer = "bert.encoder.layer.1"
    model = hf_stitch.stitch(
        network, network, data, source_layer=layer, target_layer=layer, task="ranked", matcher="identity",
        progress=False,
    )  # fmt: skip
    assert model.task == "ranked" and model.evaluation is not None and model.evaluation["hit_rate"].value == 1
    grid = hf_stitch.stitch_grid(network, network, data, layers_a=[layer], layers_b=[layer], task="ranked", resamples=5)
    assert grid.figures == ("hit_rate", "agreement", "structural_error")
