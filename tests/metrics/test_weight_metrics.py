"""Metrics of weights: refused where rows are needed, compared without data, mixed with activations, in callbacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import timm
import timm.models
import torch
from hf_stitch_testing import check_weight_metric
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from typer.testing import CliRunner

import hf_stitch
from hf_stitch.analysis import permutation_test
from hf_stitch.cli import app
from hf_stitch.metrics import MomentsMetric, NotComparable, WeightMetric
from hf_stitch.registry import registries
from hf_stitch.results import Result
from hf_stitch.statistics import Weights
from hf_stitch.training import Dynamics, DynamicsRecorder, SimilarityCallback, TaskLoss


def words(result: Result) -> str:
    """The table of a result as one line, without frames."""
    return " ".join(str(result).split())


X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


def angle(x: Weights, y: Weights, *, halved: bool = False) -> float:
    a, b = x.tensors["weight"], y.tensors["weight"]
    if a.shape != b.shape:
        raise NotComparable(x.layer, f"the shapes {tuple(a.shape)} and {tuple(b.shape)} differ")
    return float(torch.arccos(torch.cosine_similarity(a.flatten(), b.flatten(), 0).clamp(-1, 1))) / (1 + halved)


class WeightAngle(WeightMetric):
    name, title = "weight_angle", "angle of weights"
    function = staticmethod(angle)
    higher_is_better, triangle_inequality, range = False, True, (0.0, float(np.pi))

    def read(self, model: nn.Module) -> dict[str, Weights]:
        layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        if not layers:
            raise ValueError("weight_angle reads linear layers, but the network has none")
        return {name: Weights(name, {"weight": each.weight.detach().double().clone()}) for name, each in layers.items()}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    registries.metrics.register("weight_angle", WeightAngle)
    yield
    del registries.metrics._entries["weight_angle"]


class Net(nn.Module):
    config: ClassVar[Any] = None

    def __init__(self, seed: int = 0, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.body(x))
        return logits if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_conforms() -> None:
    check_weight_metric("weight_angle", Net(0), Net(1))
    check_weight_metric(WeightAngle, Net(0), Net(1), halved=True)


def test_a_similarity_is_largest_for_a_layer_and_itself() -> None:
    similar = type("Similar", (WeightAngle,), {"higher_is_better": True, "triangle_inequality": False})
    with pytest.raises(AssertionError, match="must have the best value"):
        check_weight_metric(similar, Net(0), Net(1))


# -- compare ----------------------------------------------------------------------------------------------------------
def test_compare_needs_no_data() -> None:
    a, b = Net(0), Net(1)
    atlas = hf_stitch.compare(a, b, metrics=["weight_angle"])
    assert atlas.layers_a == ("body.0", "body.2", "head") and atlas.n is None and atlas.rows is None
    expected = [angle(WeightAngle().read(a)[x], WeightAngle().read(b)[x]) for x in atlas.layers_a]
    assert np.diag(atlas["weight_angle"]).tolist() == expected
    assert atlas.whole == {"weight_angle": pytest.approx(np.mean(expected))}
    assert type(atlas.whole["weight_angle"]) is float
    assert np.isnan(atlas["weight_angle"][0, 1]) and "shapes" in str(atlas.why("weight_angle", "body.0", "body.2"))
    assert "from weights, without samples; " in words(atlas) and "of the whole networks: 1.653" in words(atlas)
    assert atlas.plot() is not None
    wrapped = hf_stitch.compare(nn.DataParallel(a), b, metrics=["weight_angle"])
    np.testing.assert_array_equal(wrapped["weight_angle"], atlas["weight_angle"])


def test_layers_are_modules_and_what_is_in_them() -> None:
    atlas = hf_stitch.compare(Net(0), Net(1), metrics=["weight_angle"], layers_a=["body"], layers_b=["head", "body.0"])
    assert atlas.layers_a == ("body.0", "body.2") and atlas.layers_b == ("body.0", "head")
    assert not atlas.whole and "only one network" in atlas.undefined["weight_angle: whole network -> whole network"]


def test_metrics_of_both_kinds_mix_in_one_call() -> None:
    a, b = (hf_stitch.load(Net(seed), example_inputs=X[:2]) for seed in (0, 1))
    atlas = hf_stitch.compare(a, b, X, metrics=["linear_cka", "weight_angle"])
    alone = [hf_stitch.compare(a, b, *data, metrics=[m]) for m, data in (("linear_cka", [X]), ("weight_angle", []))]
    for one, metric in zip(alone, atlas.metrics, strict=True):
        np.testing.assert_array_equal(atlas[metric], one[metric])
        assert atlas.best_matches(metric) == one.best_matches(metric) and atlas.best_pair(metric) == one.best_pair()
    assert len(atlas.to_pandas()) == sum(len(one.to_pandas()) for one in alone)
    assert "weight_angle" in str(atlas)
    again = hf_stitch.SimilarityAtlas.from_dict(atlas.to_dict())
    np.testing.assert_array_equal(again["weight_angle"], alone[1]["weight_angle"])


def test_compare_all_has_a_value_for_each_pair_of_networks() -> None:
    found = hf_stitch.compare_all({name: Net(seed) for seed, name in enumerate("abc")}, metrics=["weight_angle"])
    assert found.similarities()[0, 1] == found.between("a", "b").whole["weight_angle"]
    assert found.similarities().shape == (3, 3) and np.allclose(np.diag(found.similarities()), 0)
    assert "of whole networks" in words(found)


def test_layers_of_activations_without_weights_are_left_out() -> None:
    nets = [hf_stitch.load(Net(seed), example_inputs=X[:2]) for seed in (0, 1)]
    atlas = hf_stitch.compare(
        *nets, X, metrics=["linear_cka", "weight_angle"], layers_a=["body.1", "head"], layers_b=(n for n in ["head"])
    )
    assert atlas.layers_a == ("body.1", "head") and atlas.weights is not None and atlas.weights.layers_a == ("head",)


def test_weights_that_are_not_finite_have_no_value() -> None:
    broken = Net(1)
    with torch.no_grad():
        broken.head.weight.fill_(torch.inf)
    atlas = hf_stitch.compare(Net(0), broken, metrics=["weight_angle"])
    assert np.isnan(atlas["weight_angle"][2, 2]) and "infinity" in str(atlas.why("weight_angle", "head", "head"))
    assert not atlas.whole


def test_networks_of_several_architectures_have_no_value_as_a_whole() -> None:
    found = hf_stitch.compare_all({"a": Net(0), "b": Net(1), "c": Net(2, width=5)}, metrics=["weight_angle"])
    assert (
        np.isnan(found.similarities()[0, 2])
        and "is undefined" in found.between("a", "c").undefined["weight_angle: whole network -> whole network"]
    )
    with pytest.raises(ValueError, match=r"undefined for the whole networks 'a' and 'c': layer 'body.0' is undefined"):
        found.distances()


def test_command_line_needs_no_data(tmp_path: Path) -> None:
    for name in "ab":
        network = timm.create_model("test_resnet", num_classes=4)
        timm.models.save_for_hf(network, str(tmp_path / name), model_args={"num_classes": 4}, safe_serialization=True)
    call = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    found = CliRunner().invoke(app, [*call, "--metric", "weight_angle", "--json", "--out", str(tmp_path / "out")])
    assert found.exit_code == 0, found.output
    record = json.loads(found.stdout)
    assert record["n"] is None and record["whole"].keys() == {"weight_angle"}
    assert hf_stitch.SimilarityAtlas.load(tmp_path / "out" / "atlas.json").whole == record["whole"]
    listed = json.loads(CliRunner().invoke(app, ["list", "metrics", "--json"]).stdout)
    assert {"weight_angle": "lower"}.items() <= {entry["name"]: entry["direction"] for entry in listed}.items()
    missing = CliRunner().invoke(app, call)
    assert missing.exit_code == 2 and "--data" in missing.output


# -- callbacks --------------------------------------------------------------------------------------------------------
def trainer(folder: Path, model: nn.Module, **options: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "output_dir": str(folder), "num_train_epochs": 3, "per_device_train_batch_size": 8, "report_to": [],
        "use_cpu": True, "seed": 0, "learning_rate": 0.1, "disable_tqdm": True, "save_strategy": "no", **options,
    }  # fmt: skip
    data = [{"x": row, "labels": int(row.sum() > 0)} for row in X]
    return Trainer(model=model, args=TrainingArguments(**arguments), train_dataset=data)


def test_callbacks_need_neither_probe_nor_adapter(tmp_path: Path) -> None:
    start, run = Net(0), trainer(tmp_path, Net(0))
    callback = SimilarityCallback("start", metrics=["weight_angle"]).attach(run)
    recorder = DynamicsRecorder(tmp_path / "recordings", metric="weight_angle").attach(run)
    run.train()
    direct = hf_stitch.compare(run.model, start, metrics=["weight_angle"])
    last = callback.history[-1].figures
    whole = direct.whole["weight_angle"]
    assert last["similarity_to_start/weight_angle/whole network"] == pytest.approx(whole, abs=1e-12)
    assert last["similarity_to_start/weight_angle/head"] == pytest.approx(direct["weight_angle"][2, 2], abs=1e-12)
    dynamics = recorder.result()
    assert dynamics.epochs == (0, 1, 2, 3) and dynamics.n is None and dynamics.whole is not None
    assert dynamics.values["head"][0, -1] == pytest.approx(direct["weight_angle"][2, 2], abs=1e-12)
    assert Dynamics.from_dict(dynamics.to_dict()).whole is not None
    assert dynamics.plot() is not None and str(dynamics)


def test_a_resumed_run_continues_its_history(tmp_path: Path) -> None:
    def watched(folder: str) -> tuple[Trainer, SimilarityCallback, DynamicsRecorder]:
        run = trainer(tmp_path / folder, Net(0), save_strategy="epoch")
        callback = SimilarityCallback("start", metrics=["weight_angle"]).attach(run)
        return run, callback, DynamicsRecorder(tmp_path / folder / "own", metric="weight_angle").attach(run)

    whole, expected, recorded = watched("run")
    whole.train()
    dynamics = recorded.result()
    checkpoint = sorted((tmp_path / "run").glob("checkpoint-*"), key=lambda path: int(path.name[11:]))[0]
    again, callback, recorder = watched("run")
    with torch.no_grad():
        again.model.head.weight.mul_(2)  # type: ignore[union-attr]
    again.train(resume_from_checkpoint=str(checkpoint))
    assert callback.history == expected.history
    assert recorder.result().to_dict() == dynamics.to_dict()
    other = trainer(tmp_path / "run", Net(0))
    SimilarityCallback("start", layers=["head"], metrics=["weight_angle"]).attach(other)
    with pytest.raises(ValueError, match=r"contains the layers body.0, body.2, head, but the callback measures head"):
        other.train(resume_from_checkpoint=str(checkpoint))


def test_a_layer_without_a_value_becomes_nan(tmp_path: Path) -> None:
    net = Net(0)
    callback = SimilarityCallback("start", metrics=["weight_angle"])
    callback.measure(net, step=0)
    with torch.no_grad():
        net.head.weight.fill_(torch.nan)
    figures = callback.measure(net, step=1)
    names = [f"similarity_to_start/weight_angle/{layer}" for layer in ("body.0", "head", "whole network")]
    assert [np.isnan(figures[name]) for name in names] == [False, True, True]


def test_a_recorder_refuses_another_network(tmp_path: Path) -> None:
    recorder = DynamicsRecorder(tmp_path / "own", metric="weight_angle")
    recorder.measure(Net(0), step=0)
    with pytest.raises(ValueError, match="measures another network"):
        recorder.measure(Net(0), step=1)


# -- refusals ---------------------------------------------------------------------------------------------------------
class Seeded(WeightAngle):
    """A metric whose layers share a text that is another one in each network."""

    def read(self, model: nn.Module) -> dict[str, Weights]:
        return {name: Weights(name, each.tensors, shared=str(id(model))) for name, each in super().read(model).items()}


def compared(b: Any = None, metrics: Any = ("weight_angle",), **options: Any) -> Any:
    return hf_stitch.compare(Net(0), b or Net(1), metrics=metrics, **options)


BOTH = ["weight_angle", "linear_cka"]
KEPT = hf_stitch.Activations({"0": X}, tuple(range(40)))
REFUSALS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: type("Wrong", (MomentsMetric,), {"statistic": "weights"}), TypeError, "derive it from WeightMetric"),
    (lambda: type("Wrong", (WeightAngle,), {"statistic": "moments"}), TypeError, "metric of weights"),
    (lambda: compared(layers_a=["body.1"]), ValueError, r"layers_a must contain layers .* use body.0, body.2, head"),
    (lambda: compared(layers_a=["boddy"]), ValueError, "got 'boddy'; did you mean 'body'"),
    (lambda: compared(data=X), ValueError, "leave data out"),
    (lambda: compared(permutations=10), ValueError, "does not support a plan, permutations"),
    (lambda: compared(metrics=["weight_angle", "weight_angle"]), ValueError, "name each method once"),
    (lambda: compared(metrics=["weight_angle:halve=True"]), TypeError, "halved"),
    (lambda: compared(metrics=[Seeded()]), ValueError, "undefined for all pairs.*requires layers that share"),
    (lambda: compared(nn.Sequential(nn.Tanh())), ValueError, "has none"),
    (lambda: compared(Net(1, 5), layers_a=["head"], layers_b=["head"]), ValueError, "undefined for all pairs"),
    (lambda: compared(KEPT), TypeError, "must be a network to compare weights"),
    (lambda: hf_stitch.plan(hf_stitch.compare, Net(0), Net(1), metrics=["weight_angle"]), ValueError, "support a plan"),
    (lambda: hf_stitch.compare_all([Net(0), Net(1)], metrics=BOTH), ValueError, "in a separate call"),
    (lambda: permutation_test("weight_angle", X.numpy(), X.numpy()), ValueError, "activations, got weight_angle"),
    (lambda: TaskLoss(penalties={"weight_angle": 1.0}), ValueError, "activations, got weight_angle"),
    (lambda: SimilarityCallback("start", X, metrics=["weight_angle"]), ValueError, "remove probe="),
    (lambda: SimilarityCallback("start", metrics=BOTH), ValueError, "pass probe="),
    (lambda: DynamicsRecorder("unused"), ValueError, "pass probe="),
    (lambda: SimilarityCallback(KEPT, X, metrics=BOTH), TypeError, "the reference contains activations"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS)
def test_what_weights_cannot_give_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_start_of_other_layers_is_refused(tmp_path: Path) -> None:
    other = Net(1)
    other.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="only one of the networks has layer 'extra'"):
        SimilarityCallback(other, metrics=["weight_angle"]).attach(trainer(tmp_path, Net(0)))
