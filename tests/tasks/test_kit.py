"""Every built-in task passes the conformance checks; so does a task of a plugin, which every verb asks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers
from hf_stitch_testing import Part, check_task
from test_masked import TEXTS as MASKED_TEXTS, network as masked_network
from test_outputs_per_sample import CUT, HEADS, bert as with_head, data_of
from test_words import TEXTS as TEXTS_OF_WORDS, labels_of as labels_of_words, network as network_of_words
from tiny_networks import TEXT, WORDS, adapted, build
from torch import Tensor
from torch.nn import functional

import hf_stitch
import hf_stitch.auto
from hf_stitch.artefacts import StitchedModel
from hf_stitch.built_ins import BUILT_INS
from hf_stitch.data import Samples
from hf_stitch.registry import Entry, registries
from hf_stitch.tasks.base import IGNORED, Array, logits_of
from hf_stitch.tasks.per_sample import TextClassification
from hf_stitch.training import TaskLoss

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
    "part",
    [part for name in BUILT_INS["tasks"] for part in check_task.parts(registries.tasks.build(name), *case(name))],
    ids=str,
)  # fmt: skip
def test_built_in_tasks_conform(part: Part) -> None:
    part()


@pytest.mark.parametrize(  # the positions of BERT count from the padding
    ("name", "side"),
    [("text-generation", "left"), *((name, "right") for name in BUILT_INS["tasks"] if name != "image-classification")],
)
def test_texts_are_measured_and_trained_as_each_alone_whatever_pads_them(name: str, side: str) -> None:
    network, data = case(name)
    network.processor.padding_side, task = side, registries.tasks.build(name).about(network)

    def read(samples: Samples) -> tuple[dict[str, Any], Tensor | None]:
        (batch,) = samples.batches(6)
        inputs = task.inputs(network, batch.samples)
        with torch.no_grad():
            measured = task.measure({"target": network.forward(inputs)}, (batch, inputs), (batch, inputs))["target"]
        return measured, task.asked(network, batch.samples, task.labels(batch)) if task.per_token else None

    together, asked = read(data.take(6))
    for place in range(6):
        alone, of_text = read(data.select([place]))
        for measure, values in alone.items():
            known = np.asarray(together[measure][place])
            known = known[~np.isnan(known)] if known.ndim == 1 else known
            np.testing.assert_allclose(known, np.asarray(values[0]), rtol=1e-4, atol=1e-5, err_msg=measure)
        if asked is not None and of_text is not None:
            assert torch.equal(asked[place][asked[place] != IGNORED], of_text[0][of_text[0] != IGNORED])


@pytest.mark.parametrize("name", ["image-classification", *LABELS])
def test_a_network_that_is_right_is_better_than_chance_in_each_figure(name: str) -> None:
    network, data = case(name)
    task = registries.tasks.build(name).about(network)
    (batch,) = data.batches(20)
    inputs = task.inputs(network, batch.samples)
    with torch.no_grad():
        logits = 100 * logits_of(network.forward(inputs))  # sure of what it predicts
    own = task.measure({"target": logits}, (batch, inputs), (batch, inputs))["target"]
    if task.per_token:
        words = task.asked(network, batch.samples, None) != IGNORED
        right = [of_text[counts].argmax(-1).tolist() for of_text, counts in zip(logits, words, strict=True)]
    else:
        kind = {"regression": "value", "multi-label-classification": "score"}.get(name, "class")
        values = own[kind] > 0 if kind == "score" else own[kind]
        right = values.astype(float if kind == "value" else int).tolist()
    (batch,) = Samples.of([*batch.samples], label=right).batches(20)
    measured = task.measure({"target": logits}, (batch, inputs), (batch, inputs))
    drawn = task.drawn({**measured, "chance": task.chance(measured, 0)}, resamples=2, seed=0)
    assert {*drawn["target"]} <= {*task.figures} and len(drawn["target"]) > 1
    for figure in drawn["target"].keys() & drawn["chance"].keys():
        apart = drawn["target"][figure][0] - drawn["chance"][figure][0]
        assert np.isnan(apart) or apart * (1 if task.figures[figure] else -1) > 0, figure


def test_a_task_of_a_plugin_is_one_class_that_every_verb_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranked(TextClassification):
        """Classification that counts the two best classes."""

        name = "ranked"
        heads = ()
        figures: ClassVar[dict[str, bool]] = {"hit_rate": True, **TextClassification.figures}
        compared = ("hit_rate", "agreement")

        def figures_of(self, answers: Any, target: Any, weights: Array) -> dict[str, Array]:
            found = super().figures_of(answers, target, weights)
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


# -- every way through the package -------------------------------------------------------------------------------------
KINDS = ("token-classification", "fill-mask", *HEADS)


@cache
def labelled(kind: str, seed: int = 0) -> tuple[hf_stitch.Adapter, Samples]:
    """A network and data with labels that it often predicts."""
    if kind == "fill-mask":
        return masked_network(seed), Samples.of(MASKED_TEXTS)
    if kind in HEADS:
        return (network := with_head(kind, seed)), Samples.of(data_of(kind, network))
    network = network_of_words(seed)
    return network, Samples.of(TEXTS_OF_WORDS, label=labels_of_words(network))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_a_saved_model_is_run_by_the_pipeline_as_its_target(kind: str, tmp_path: Path) -> None:
    network, data = labelled(kind)
    model = hf_stitch.stitch(network, network, data, matcher="identity", **CUT)
    model.save_pretrained(tmp_path)
    again, task = StitchedModel.from_pretrained(tmp_path), registries.tasks.build(str(network.task))
    (batch,) = data.take(3).batches(3)
    inputs = task.inputs(network, batch.samples)
    assert again.task == model.task and torch.equal(again(**inputs).logits, network.forward(inputs).logits)
    assert again.config.id2label == network.model.config.id2label
    name, card = task.pipelines.get("text", task.pipelines.get("")), (tmp_path / "README.md").read_text()
    assert f"pipeline_tag: {name}" in card
    pipe = transformers.pipeline(name, model=str(tmp_path))
    own = transformers.pipeline(name, model=network.model, tokenizer=network.processor)
    options: dict[str, Any] = {"token-classification": {"aggregation_strategy": "first"}, "fill-mask": {}}.get(
        kind, {"top_k": None} | ({"function_to_apply": "none"} if kind != "four classes" else {})
    )
    texts = [" ".join([*WORDS[:3], "[MASK]", *WORDS[5:8]])] if kind == "fill-mask" else [*batch.samples]
    assert pipe(texts, **options) == own(texts, **options)
    if kind in HEADS:
        record = json.loads((tmp_path / "config.json").read_text())
        assert record["problem_type"] == (HEADS[kind].get("problem_type") or "regression") and "argmax" not in card
    if kind == "one number":  # function_to_apply: none is what the pipeline chooses
        logits = network.forward(inputs).logits[:, 0].tolist()
        assert [each["score"] for each in pipe(texts)] == pytest.approx(logits, abs=1e-6)
        assert hf_stitch.load(str(tmp_path)).task == "regression"


@pytest.mark.parametrize("labels", ["hard", "target"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_torch_and_training_lowers_it(kind: str, labels: str) -> None:
    (network, data), (other, _), losses = labelled(kind), labelled(kind, 1), {}
    data = data.take(40)
    task = registries.tasks.build(str(network.task)).about(network)
    common = {"initial": "identity", "schedule": "constant", "lr": 1e-2, "batch_size": len(data), "labels": labels}
    options: dict[str, Any] = {"test_data": data.take(5), **CUT}
    for steps in (1, 30):
        matcher = TaskLoss(max_steps=steps, **common)
        losses[steps] = hf_stitch.stitch(other, network, data, matcher=matcher, **options).stitch.body.fitted["loss"]
    start, each = hf_stitch.stitch(other, network, data, matcher="identity", **options), list[Tensor]()
    for batch in data.batches(1):
        inputs, true = task.inputs(network, batch.samples), task.labels(batch)
        asked = task.asked(network, batch.samples, true if labels == "hard" or not task.per_token else None)
        logits, wanted = start(**inputs).logits, network.forward(inputs).logits if labels == "target" else asked
        if task.per_token:
            counts = asked != IGNORED
            wanted = wanted[counts].softmax(-1) if labels == "target" else wanted[counts]
            each += functional.cross_entropy(logits[counts], wanted, reduction="none")
        elif kind == "four classes":
            probabilities = wanted.sigmoid() if labels == "target" else wanted
            each.append(functional.binary_cross_entropy_with_logits(logits, probabilities))
        else:
            each.append(functional.mse_loss(logits, wanted))
    assert losses[1] == pytest.approx(torch.stack(each).mean().item(), rel=1e-4)
    assert losses[30] < 0.9 * losses[1]


@pytest.mark.parametrize("kind", ["token-classification", *HEADS])
def test_a_stitched_module_has_the_loss_of_its_target(kind: str) -> None:
    network, data = labelled(kind)
    model = hf_stitch.stitch(network, network, data.take(40), matcher="identity", **CUT)
    task, (batch,) = registries.tasks.build(str(network.task)).about(network), data.take(4).batches(4)
    inputs, labels = network.preprocess(batch.samples), task.asked(network, batch.samples, task.labels(batch))
    for each in (labels, *([labels[:, 0]] * (kind == "one number"))):
        found = model(**inputs, labels=each).loss
        torch.testing.assert_close(found, network.model(**inputs, labels=each).loss)
        found.backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.target.parameters())


def test_outputs_measured_together_are_those_measured_one_by_one() -> None:
    task, random = TextClassification(), torch.Generator().manual_seed(0)
    (batch,) = Samples.of(torch.randn(20, 3, generator=random), label=[i % 4 for i in range(20)]).batches(20)
    outputs = {f"cell {i}": 9 * i * torch.randn(20, 4, generator=random) for i in range(1, 9)}
    outputs |= {"target": torch.randn(20, 4, generator=random), "source": torch.randn(20, 5, generator=random)}
    outputs["cell 3"][7, 1] = torch.nan
    found = task.measure(outputs, (batch, {}), (batch, {}))
    for name, output in outputs.items():
        alone = task.measure({"target": outputs["target"], name: output}, (batch, {}), (batch, {}))[name]
        assert found[name].keys() == alone.keys() and ("distance" in alone) == (name != "source")
        for measure, values in alone.items():
            np.testing.assert_array_equal(found[name][measure], values)
    assert found["cell 3"]["class"][7] == -1
