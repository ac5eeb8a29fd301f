"""Regression and multi-label classification: figures of other libraries, and every way through the package."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import timm
import torch
import transformers
from scipy.stats import pearsonr, spearmanr
from sklearn import metrics
from tiny_networks import TEXT, WORDS, adapted
from torch import nn

import hf_stitch
import hf_stitch.auto
from hf_stitch.artefacts import StitchedModel
from hf_stitch.data import Samples
from hf_stitch.tasks.base import resampled
from hf_stitch.tasks.heads import task_named
from hf_stitch.training import StitchabilityCallback, TaskLoss

BERT = "bert.encoder.layer.1"
TEXTS = [" ".join((WORDS * 3)[i % 31 : i % 31 + 2 + i % 5]) + f" {WORDS[i % 37]}" for i in range(150)]
HEADS: dict[str, dict[str, Any]] = {
    "one number": {"num_labels": 1},
    "three numbers": {"num_labels": 3, "problem_type": "regression"},
    "four classes": {"num_labels": 4, "problem_type": "multi_label_classification"},
}
CUT = {"source_layer": BERT, "target_layer": BERT, "progress": False}


@cache
def bert(head: str, seed: int = 0) -> hf_stitch.Adapter:
    torch.manual_seed(seed)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT, **HEADS[head])).eval()
    with torch.no_grad():  # outputs of tiny networks hardly differ
        model.classifier.weight *= 100
        model.classifier.bias -= outputs(adapted("bert", model)).float().mean(0)
    return adapted("bert", model)


@cache
@torch.no_grad()
def outputs(network: Any) -> torch.Tensor:
    return torch.cat([network.forward(network.preprocess([text])).logits for text in TEXTS]).double()


def labels_of(head: str, network: hf_stitch.Adapter) -> np.ndarray[Any, Any]:
    """Labels that the network predicts well, but not perfectly."""
    noise = torch.randn(len(TEXTS), HEADS[head]["num_labels"], generator=torch.Generator().manual_seed(1))
    noisy = (own := outputs(network)) + 0.3 * own.std(0) * noise
    return (noisy > 0).long().numpy() if head == "four classes" else noisy.numpy()


def data_of(head: str, network: hf_stitch.Adapter) -> Samples:
    found = labels_of(head, network)
    return Samples.of(TEXTS, label=found[:, 0] if found.shape[1] == 1 else found)


# -- figures against other libraries -----------------------------------------------------------------------------------
def drawn(task: str, rows: dict[str, Any], resamples: int = 5) -> dict[str, dict[str, Any]]:
    return task_named(task).drawn(rows, resamples=resamples, seed=0)


@pytest.mark.parametrize("count", [1, 3])
def test_figures_of_regression_are_those_of_scipy_and_sklearn_on_every_resample(count: int) -> None:
    rng = np.random.default_rng(0)
    label, target, own = (rng.normal(size=(40, count)) for _ in range(3))
    own, target = (label + own).round(1), label + 0.1 * target  # with ties
    found = drawn("regression", {"target": {"value": target, "label": label}, "stitched": {"value": own}})["stitched"]
    for place, weights in enumerate(np.concatenate(list(resampled(40, 5, 0)))):
        again = np.repeat(np.arange(40), weights.astype(int))
        x, y, whole = own[again], label[again], target[again]
        r2 = metrics.r2_score(y, x)
        expected = {
            "r2": r2, "relative_r2": r2 / metrics.r2_score(y, whole), "agreement": metrics.r2_score(whole, x),
            "mse": metrics.mean_squared_error(y, x),
            "pearson": np.mean([pearsonr(x[:, i], y[:, i])[0] for i in range(count)]),
            "spearman": np.mean([spearmanr(x[:, i], y[:, i])[0] for i in range(count)]),
        }  # fmt: skip
        assert {name: values[place] for name, values in found.items()} == pytest.approx(expected, abs=1e-12)
    assert list(found) == list(task_named("regression").compared)


def test_figures_of_several_classes_are_those_of_sklearn_on_every_resample() -> None:
    rng = np.random.default_rng(0)
    label = (rng.random((40, 4)) < [0.5, 0.3, 0.1, 0.0]).astype(float)  # no sample has the last class
    own, target = ((label - 0.5 + rng.normal(size=(40, 4))).round(1) for _ in range(2))
    rows = {"target": {"score": target, "label": label}, "stitched": {"score": own}}
    found = drawn("multi-label-classification", rows)["stitched"]
    for place, weights in enumerate(np.concatenate(list(resampled(40, 5, 0)))):
        again = np.repeat(np.arange(40), weights.astype(int))
        y, scores, whole = label[again], own[again], target[again] > 0
        has = y.any(0)
        micro = metrics.f1_score(y, scores > 0, average="micro")
        expected = {
            "micro_f1": micro, "relative_micro_f1": micro / metrics.f1_score(y, whole, average="micro"),
            "agreement": metrics.f1_score(whole, scores > 0, average="micro"),
            "macro_f1": metrics.f1_score(y[:, has], scores[:, has] > 0, average="macro"),
            "mean_average_precision": metrics.average_precision_score(y[:, has], scores[:, has]),
            "exact_match": metrics.accuracy_score(y, scores > 0),
        }  # fmt: skip
        assert {name: values[place] for name, values in found.items()} == pytest.approx(expected, abs=1e-12)


def test_figures_of_many_stitches_are_those_of_each() -> None:
    rng = np.random.default_rng(0)
    for task, measure in (("regression", "value"), ("multi-label-classification", "score")):
        label = (rng.random((30, 3)) < 0.5).astype(float)
        many, target = rng.normal(size=(30, 5, 3)), rng.normal(size=(30, 3))
        whole = {"target": {measure: target, "label": label}}
        together = drawn(task, {**whole, "stitched": {measure: many}})["stitched"]
        for place in range(5):
            alone = drawn(task, {**whole, "stitched": {measure: many[:, place]}})["stitched"]
            for name, values in alone.items():
                np.testing.assert_allclose(together[name][:, place], values, rtol=1e-12)


def test_constants_are_no_better_than_chance() -> None:
    label = np.random.default_rng(0).normal(size=(50, 1)) + 1000
    target = {"value": label + 0.5, "label": label}
    chance = task_named("regression").chance({"target": target}, 0)
    np.testing.assert_allclose(chance["value"], label.mean())
    found = drawn("regression", {"target": target, "chance": chance, "constant": {"value": np.full((50, 1), 1000.0)}})
    assert found["chance"]["r2"][0] == pytest.approx(0, abs=1e-12) and (found["chance"]["r2"][1:] <= 1e-12).all()
    assert (found["constant"]["r2"] <= 1e-12).all()
    assert all(np.isnan(found[who][name]).all() for who in ("chance", "constant") for name in ("pearson", "spearman"))
    equal = {"value": np.ones((9, 1)), "label": np.ones((9, 1))}
    undefined = drawn("regression", {"target": equal, "stitched": equal})["stitched"]
    assert all(np.isnan(values).all() for name, values in undefined.items() if name != "mse")

    classes = (np.random.default_rng(0).random((500, 2)) < [0.7, 0.2]).astype(float)
    kinds = {"score": classes - 0.5, "label": classes}
    chance = task_named("multi-label-classification").chance({"target": kinds}, 0)
    found = drawn("multi-label-classification", {"target": kinds, "chance": chance})["chance"]
    assert found["mean_average_precision"][0] == pytest.approx(classes.mean(0).mean())
    assert found["exact_match"][0] == (classes == [1, 0]).all(1).mean()


def test_a_target_that_explains_nothing_is_no_measure_of_others() -> None:
    label = np.random.default_rng(0).normal(size=(50, 1))
    rows = {"target": {"value": 10 + 5 * label, "label": label}, "stitched": {"value": 10 + 5 * label}}
    found = drawn("regression", rows)["stitched"]
    assert np.isnan(found["relative_r2"]).all() and found["r2"][0] < 0
    assert [found[name][0] for name in ("agreement", "pearson", "spearman")] == pytest.approx([1, 1, 1])


# -- every verb --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head", HEADS)
def test_a_network_stitched_to_itself_is_the_network_in_every_verb(head: str) -> None:
    network = bert(head)
    data, task = data_of(head, network), "multi-label-classification" if head == "four classes" else "regression"
    assert network.task == task and not network.unscored
    model = hf_stitch.stitch(network, network, data, matcher="identity", **CUT)
    assert (type(model).__name__, model.task) == ("StitchedModelForSequenceClassification", task)
    found = hf_stitch.evaluate(model, data, batch_size=7, examples=2, resamples=50, progress=False)
    own, label = outputs(network).numpy(), labels_of(head, network)
    for who in ("stitched", "identity", "source", "target"):
        row = {name: score.value for name, score in found.scores[who].items()}
        assert row == {name: score.value for name, score in found.scores["target"].items()}
        assert row["agreement"] == row[next(iter(row))] == pytest.approx(1)
        if task == "regression":
            assert row["r2"] == pytest.approx(metrics.r2_score(label, own), abs=1e-5)
            assert row["spearman"] == pytest.approx(
                np.mean([spearmanr(own[:, i], label[:, i])[0] for i in range(own.shape[1])]), abs=1e-3
            )
        else:
            assert row["micro_f1"] == pytest.approx(metrics.f1_score(label, own > 0, average="micro"))
            assert row["mean_average_precision"] == pytest.approx(metrics.average_precision_score(label, own), abs=1e-3)
    assert not found.no_better and len(found.examples) == 2 and found.examples[0].label is not None
    mean_only = found.scores["mean_only"]
    assert mean_only["agreement"].value < 0.9 and mean_only[next(iter(mean_only))].high < 1
    if head == "three numbers":
        return  # the other verbs ask the task as for one number

    grid = hf_stitch.stitch_grid(
        network, network, data, test_data=Samples.of([f"{text} w1" for text in TEXTS], label=label.tolist()),
        layers_a=[BERT], layers_b=[BERT], matchers=["identity"], resamples=20, progress=False,
    )  # fmt: skip
    assert grid.figures[0] == task_named(task).compared[0] and grid.values().item() == pytest.approx(1)
    assert {*grid.baselines} == {"mean_only", "source", "target", "chance"} and grid.plot() is not None
    audit = hf_stitch.audit(model, data, detectors=["knn"], resamples=50, progress=False)
    assert audit.is_accurate and audit.figure == grid.figures[0]

    with pytest.raises(ValueError, match=f"relative accuracy requires one class per sample, but the task .* is {task}"):
        StitchabilityCallback(network, Samples.of(TEXTS, label=[0] * 150), layers=[BERT]).measure(bert(head, 1), step=0)


@pytest.mark.parametrize("head", ["one number", "four classes"])
def test_without_labels_the_agreement_is_the_figure(head: str) -> None:
    network = bert(head)
    model = hf_stitch.stitch(network, network, TEXTS, matcher="lstsq", **CUT)
    assert model.evaluation is not None
    assert {*model.evaluation.scores["stitched"]} == {"agreement"} and model.evaluation["agreement"].value > 0.9
    assert model.evaluation.scores["chance"]["agreement"].value < 0.9
    grid = hf_stitch.stitch_grid(network, network, TEXTS, layers_a=[BERT], layers_b=[BERT], resamples=9, progress=False)
    assert grid.figures == ("agreement", "structural_error")


# -- labels ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head", HEADS)
def test_labels_are_read_as_they_come(head: str) -> None:
    network, known = bert(head), labels_of(head, bert(head))
    values = known[:, 0].tolist() if known.shape[1] == 1 else known.tolist()
    rows = [{"text": text, "label": value} for text, value in zip(TEXTS, values, strict=True)][:40]
    model = hf_stitch.stitch(network, network, TEXTS[:20], matcher="identity", **CUT)
    expected = hf_stitch.evaluate(model, data_of(head, network).take(40), progress=False, resamples=9)
    assert len(expected.scores["target"]) > 3
    for data in (rows, stored := datasets.Dataset.from_list(rows), stored.rename_column("label", "target")):
        found = hf_stitch.evaluate(model, data, progress=False, resamples=9)
        assert repr(found.scores) == repr(expected.scores)  # some are NaN


@pytest.mark.parametrize(
    ("head", "label", "message"),
    [
        ("one number", [0.5, 1.0], "sample 0 has 2 numbers as label, but the target outputs 1"),
        ("three numbers", 0.5, "sample 0 has 1 numbers as label, but the target outputs 3"),
        ("four classes", 1, "requires a list of 4 numbers, 0 or 1 for each class"),
        ("four classes", [0, 1, 0, 2], r"sample 0 has label \(0, 1, 0, 2\), but multi-label"),
        ("four classes", [0, 1], "requires a list of 4 numbers"),
        ("one number", float("nan"), "sample 0 has the label nan"),
    ],
)
def test_labels_of_another_kind_are_refused_by_name_before_work(
    head: str, label: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_stitch.matchers.regression.Lstsq.match", lambda *_: pytest.fail("a map was fitted"))
    grid = {"layers_a": [BERT], "layers_b": [BERT], "progress": False}
    for verb, given in ((hf_stitch.stitch, CUT), (hf_stitch.stitch_grid, grid)):
        with pytest.raises(ValueError, match=message):
            verb(bert(head), bert(head), Samples.of(TEXTS, label=[label] * 150), **given)


def test_a_temperature_is_refused_without_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_stitch.matchers.regression.Lstsq.match", lambda *_: pytest.fail("a map was fitted"))
    network, warm = bert("one number"), TaskLoss(max_steps=1, temperature=2)
    with pytest.raises(ValueError, match=r"temperature.* regression"):
        hf_stitch.stitch(network, network, TEXTS, matcher=warm, **CUT)
    layers = {"layers_a": [BERT], "layers_b": [BERT], "progress": False}
    with pytest.raises(ValueError, match=r"temperature.* regression"):
        hf_stitch.stitch_grid(network, network, TEXTS, matchers=["lstsq", warm], **layers)


# -- which task --------------------------------------------------------------------------------------------------------
def test_the_task_of_own_networks_can_be_said() -> None:
    images = torch.randn(90, 3, 4, 4)
    made = [nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 3)).eval() for _ in range(2)]
    a, b = (hf_stitch.load(net, example_inputs=images[:2]) for net in made)
    layers = {"source_layer": "2", "target_layer": "2", "progress": False}
    numbers = Samples.of(list(images), label=b.forward(images).detach().numpy())
    multi = Samples.of(list(images), label=(b.forward(images) > 0).long().numpy())
    for task, data in (("regression", numbers), ("multi-label-classification", multi)):
        model = hf_stitch.stitch(a, b, data, task=task, **layers)
        assert model.evaluation is not None and model.evaluation.scores["target"]["agreement"].value == 1
        assert type(model).__name__ == "StitchedModelForImageClassification" and model.config.num_labels == 3
        assert model.stitcher.attach(a, b).task == task
    pixels = torch.randn(40, 3, 64, 64)
    module = timm.create_model("resnet10t", num_classes=1, channels=(8, 8, 8, 8)).eval()
    single = hf_stitch.load(module, example_inputs=pixels[:2])
    found = hf_stitch.stitch(
        single, single, pixels, source_layer="layer2.0", target_layer="layer2.0", matcher="identity", progress=False
    )
    assert found.task == "regression" and found.evaluation["agreement"].value == pytest.approx(1)


def test_rerankers_and_reward_models_are_regression() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, num_labels=1, pad_token_id=0)
    assert adapted("gpt2", transformers.GPT2ForSequenceClassification(config).eval()).task == "regression"
    reranker = bert("one number")
    pairs = [(text, other) for text, other in zip(TEXTS, TEXTS[1:] + TEXTS[:1], strict=True)]
    scores = [float(i % 2) for i in range(150)]
    model = hf_stitch.stitch(reranker, reranker, Samples.of(pairs, label=scores), matcher="identity", **CUT)
    assert model.evaluation is not None and model.evaluation["agreement"].value == pytest.approx(1)


# -- what 0.2 wrote ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head", ["one number", "four classes"])
def test_a_model_recorded_as_a_classifier_has_the_task_of_its_head_and_no_scores(head: str, tmp_path: Path) -> None:
    network = bert(head)
    model = hf_stitch.stitch(network, network, TEXTS, matcher="identity", **CUT)
    model.stitcher.save_pretrained(tmp_path / "stitcher")
    model.save_pretrained(tmp_path / "model")
    wrong = {"accuracy": {"value": 1.0, "low": 1.0, "high": 1.0}}
    scores = {"task": "text-classification", "n": 60, "data": "sha256:0", "scores": {"stitched": wrong}}
    for name, file in (("model", "config.json"), ("stitcher", "stitch.json")):
        path = next((tmp_path / name).glob(file), None) or next((tmp_path / name).glob("*.json"))
        record = json.loads(path.read_text())
        recipe = {**record["recipe"], "audit": {"verdict": "x"}}
        record |= {"task": "text-classification", "scores": scores, "recipe": recipe}
        path.write_text(json.dumps(record))
    with pytest.warns(UserWarning, match=f"but its head is for {model.task}: the model has this task") as told:
        again = StitchedModel.from_pretrained(tmp_path / "model", allow_modified=True)
    assert len([each for each in told if "the model has this task" in str(each.message)]) == 1
    assert again.task == model.task and again.config.scores is None and "audit" not in again.config.recipe
    assert again.describe().scores == {}
    stitcher = hf_stitch.Stitcher.from_pretrained(tmp_path / "stitcher", allow_modified=True)
    with pytest.warns(UserWarning, match=f"the head of its target is for {model.task}: the model has this task"):
        attached = stitcher.attach(network, network)
    assert attached.task == model.task and attached.config.scores is None
