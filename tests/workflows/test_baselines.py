"""A result that does not beat its baselines says so, and so does one that is no correspondence."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hf_stitch
from hf_stitch import Adapter, Samples, evaluate, stitch, stitch_grid, swap

QUIET: dict[str, Any] = {"progress": False}
SCORED: dict[str, Any] = {"task": "image-classification", **QUIET}
BEATS_NOT = "not better than"


def made(seed: int, classes: int = 3) -> Adapter:
    torch.manual_seed(seed)
    layers = (nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, classes))
    return hf_stitch.load(nn.Sequential(*layers), example_inputs=torch.randn(2, 6))


def labelled(network: Adapter, n: int = 300) -> Samples:
    """Samples whose labels are the classes that a network predicts."""
    rows = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return Samples.of(list(rows), label=network.model(rows).argmax(1).tolist())


def printed(result: Any) -> str:
    return " ".join(str(result).split())


@pytest.fixture
def b() -> Adapter:
    return made(1)


def test_a_stitch_that_beats_no_baseline_says_so_with_the_names_of_the_baselines(b: Adapter) -> None:
    with pytest.warns(UserWarning, match=r"accuracy is not better than mean only, chance"):
        model = stitch(made(0), b, labelled(b), source_layer="1", target_layer="1", matcher="random", **SCORED)
    assert model.evaluation.no_better == ("mean_only", "chance")
    assert f"accuracy is {BEATS_NOT} mean only, chance" in printed(model.evaluation)
    assert model.config.scores["no_better"] == ["mean_only", "chance"]


def test_a_further_baseline_takes_the_name_of_no_other_score(b: Adapter) -> None:
    model = stitch(made(0), b, labelled(b), source_layer="1", target_layer="1", matcher="ridge", **SCORED)
    for name in ("stitched", "source", "target", "chance"):
        with pytest.raises(ValueError, match=f"baselines must not contain the reserved name '{name}'"):
            evaluate(model, labelled(b), target=b, baselines={name: model.stitch}, **QUIET)


@pytest.mark.parametrize("matcher", ["ridge", "identity"])
def test_an_exact_identity_is_no_rival(b: Adapter, matcher: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = stitch(b, b, labelled(b), source_layer="1", target_layer="1", matcher=matcher, **SCORED)
    assert model.evaluation.no_better == () and BEATS_NOT not in printed(model.evaluation)


def test_between_different_layers_of_one_network_the_identity_is_a_rival(b: Adapter) -> None:
    model = stitch(b, b, labelled(b), source_layer="1", target_layer="3", matcher="ridge", **SCORED)
    with torch.no_grad():
        model.stitch.body.weight.copy_(torch.eye(16))
        model.stitch.body.bias.zero_()
    with pytest.warns(UserWarning, match="not better than identity"):
        assert "identity" in evaluate(model, labelled(b), **QUIET).no_better


def test_lower_figures_are_better_where_they_measure_a_loss() -> None:
    from hf_stitch.scoring.measured import not_beaten
    from hf_stitch.tasks.heads import task_named

    def drawn(value: float) -> dict[str, Any]:
        return {"perplexity": torch.linspace(value, value + 0.1, 50).numpy()}

    rows = {"stitched": drawn(5.0), "identity": drawn(4.0), "mean_only": drawn(9.0), "chance": drawn(5.0)}
    assert not_beaten(task_named("text-generation"), rows) == ("identity", "chance")


def test_a_grid_counts_the_stitches_that_beat_no_baseline(b: Adapter) -> None:
    layers: dict[str, Any] = {"layers_a": ["1"], "layers_b": ["3"]}
    with pytest.warns(UserWarning, match="of 2 stitches are not better than the mean activations"):
        grid = stitch_grid(made(0), b, labelled(b), matchers=["ridge", "random"], **layers, **SCORED)
    assert grid.no_better == ("random: 1 -> 3",)
    assert "1 of 2 stitches are not better than the mean activations of the target or chance" in printed(grid)


def test_a_stitch_inside_one_network_is_said_to_be_no_correspondence(b: Adapter) -> None:
    said = "source and target are the same network"
    layers = {"source_layer": "1", "target_layer": "3", "matcher": "ridge"}
    for source in (b, made(0)):
        assert (said in printed(stitch(source, b, labelled(b), **layers, **SCORED).evaluation)) == (source is b)
    assert said in printed(stitch_grid(b, b, labelled(b), layers_a=["3"], layers_b=["1"], matchers=["ridge"], **SCORED))


def test_another_source_than_that_of_the_model_is_said(b: Adapter) -> None:
    data = labelled(b)
    model = stitch(made(0), b, data, source_layer="1", target_layer="1", matcher="ridge", **SCORED)
    with pytest.warns(UserWarning, match="source= differs from the source of this model"):
        evaluate(model, data, source=made(2), **QUIET)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*source= differs from the source")
        evaluate(model, data, source=made(0), **QUIET)


def test_two_columns_that_could_be_the_labels_stop_neither_a_stitch_nor_a_grid(texts: Any, net: Any) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    kinds = Features(text=Value("string"), coarse=ClassLabel(num_classes=3), fine=ClassLabel(num_classes=50))
    data = Dataset.from_list([{"text": t["text"], "coarse": t["label"], "fine": 7} for t in texts], features=kinds)
    a, b = net("bert", 0), net("bert", 1)
    places: dict[str, Any] = {"source_layer": "bert.encoder.layer.0", "target_layer": "bert.encoder.layer.0"}
    said = r"several columns could be the labels: 'coarse', 'fine'.*Samples.of\(data, label='coarse'\).*unlabelled"
    with pytest.warns(UserWarning, match=said):
        model = stitch(a, b, data, matcher="ridge", **places, **QUIET)
    assert list(model.evaluation.scores["stitched"]) == ["agreement", "kl_divergence"]
    with pytest.warns(UserWarning, match=said):
        grid = stitch_grid(a, b, data, layers_a=[places["source_layer"]], layers_b=[places["target_layer"]], **QUIET)
    assert "accuracy" not in grid.figures
    chosen = stitch(a, b, Samples.of(data, label="coarse"), matcher="ridge", **places, **QUIET)
    assert "accuracy" in chosen.evaluation.scores["stitched"]


@pytest.mark.parametrize("task", ["image-classification", None])
def test_outputs_that_are_nan_are_no_predictions_and_beat_no_baseline(b: Adapter, task: str | None) -> None:
    data = labelled(b)
    model = stitch(made(0), b, data, source_layer="1", target_layer="1", matcher="ridge", task=task, **QUIET)
    model.stitch.body.weight.data[:] = torch.nan
    with pytest.warns(UserWarning, match=BEATS_NOT):
        found = evaluate(model, data, **QUIET)
    if task is not None:
        assert (found["accuracy"].value, found["agreement"].value) == (0, 0)
        assert {name for row in found.confusion.values() for name in row} == {"none"}
    assert {"mean_only", "chance"} <= {*found.no_better}


def test_a_source_of_other_classes_is_not_scored_beside_a_model_before_its_swap(b: Adapter) -> None:
    anchors, data, other = labelled(b).take(40), labelled(b).select(range(40, 300)), made(2, classes=5)
    before = hf_stitch.relative_model(b, anchors, layer="1", num_labels=3, task="image-classification")
    after = swap(before, other, anchors, encoder_layer="1", **QUIET)
    other = hf_stitch.load(other.model, example_inputs=torch.randn(2, 6), task="image-classification")
    found = evaluate(after, data, target=before, source=other, **QUIET)
    assert "source" not in found.scores
    assert found.left_out["source"] == "its head has other classes"
    assert "no source: its head has other classes" in str(found)
