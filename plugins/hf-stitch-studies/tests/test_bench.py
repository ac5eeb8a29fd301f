"""The bench on networks: each runs once, stitched models are scored, and the command writes what the function finds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_studies import Bench, bench, linear_probe
from hf_stitch_studies.benching import workflow
from hf_stitch_studies.benching.result import _format_score
from torch import nn
from typer.testing import CliRunner

import hf_stitch
from hf_stitch.analysis import Activations
from hf_stitch.cli import app, networks
from hf_stitch.data import read_data
from hf_stitch.scoring.measured import Score

GENERATOR = torch.Generator().manual_seed(0)
POINTS = torch.randn(240, 4, generator=GENERATOR)
SAMPLES = hf_stitch.Samples.of(POINTS, label=(POINTS[:, 0] > POINTS[:, 1]).long().tolist())
LAYERS = ["1", "3"]


def net(seed: int) -> hf_stitch.Adapter:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    return hf_stitch.load(model, example_inputs=POINTS[:2])


def run(**options: Any) -> Bench:
    options = {"layers": LAYERS, "ranks": [2], "probe_epochs": 3, "references": 2, "progress": False, **options}
    return bench({name: net(i) for i, name in enumerate("abc")}, SAMPLES, **options)


def test_each_network_runs_once_per_batch() -> None:
    several, counts = [net(seed) for seed in range(3)], [0] * 3

    def count(number: int) -> Any:
        def add(*_: Any) -> None:
            counts[number] += 1

        return add

    for number, each in enumerate(several):
        _ = each.layers  # verified with forwards of their own
        each.model.register_forward_pre_hook(count(number))
    bench(several, SAMPLES, layers=LAYERS, batch_size=48, probe_epochs=1, progress=False)
    assert counts == [4 + 1] * 3  # 192 training and 48 test samples


def test_accuracies_are_those_of_probes_on_the_activations_of_the_networks() -> None:
    found = run(sensitivity_layers=[], probe_epochs=5, seed=3)
    train, test = SAMPLES.split(0.2, 3)
    scoring = test.split(0.5, 3)[1]
    (group,) = found.groups
    adapter = net(1)
    for layer in LAYERS:
        rows = [
            hf_stitch.analysis.extract_activations(adapter, part, layers=[layer], progress=False).values[layer]
            for part in (train, scoring)
        ]
        probe = linear_probe(rows[0], train.labels or [], classes=2, epochs=5, seed=3)
        right = probe(rows[1]).argmax(1) == torch.tensor(scoring.labels)
        place = [i for i, of in enumerate(zip(group.networks, group.layers, strict=True)) if of == ("b", layer)]
        assert group.accuracy[place[0]] == pytest.approx(right.float().mean().item())
    assert found.n == len(scoring)


def test_functional_distances_are_those_of_grids() -> None:
    found = run(
        functional=["lstsq"], task="image-classification", metrics=[], sensitivity_layers=["1"], functional_samples=60
    )
    group = found.groups[-1]
    train, test = SAMPLES.split(0.2, 0)
    fitted, scoring = train.split(60, 0)[1], test.split(0.5, 0)[1]
    place = group.references[0]
    other = next(i for i, name in enumerate(group.networks) if name != group.networks[place])
    grid = hf_stitch.stitch_grid(
        net("abc".index(group.networks[other])), net("abc".index(group.networks[place])), fitted, test_data=scoring,
        layers_a=LAYERS, layers_b=[group.layers[place]], task="image-classification", resamples=2, progress=False,
    )  # fmt: skip
    expected = 1 - grid.values("lstsq", "relative_accuracy")[LAYERS.index(group.layers[other]), 0]
    assert group.distances["lstsq, functional"][0, other] == pytest.approx(expected)
    assert found.kinds["lstsq, functional"] == "matcher, functional"


def test_approximations_are_stitched_as_what_they_are() -> None:
    """The functional distance of an approximation is that of a network whose layer was replaced by it."""
    ranks = [6, 3, 1]
    found = run(
        functional=["lstsq"], task="image-classification", metrics=[], sensitivity_layers=["1"], functional_samples=60,
        ranks=ranks,
    )  # fmt: skip
    group = found.groups[0]
    train, test = SAMPLES.split(0.2, 0)
    fitted, scoring = train.split(60, 0)[1], test.split(0.5, 0)[1]
    place = group.references[0]
    target = net("abc".index(group.networks[place]))
    distances = group.distances["lstsq, functional"][0]
    inputs = [torch.stack(next(each.batches(len(each))).samples) for each in (fitted, scoring)]
    labels = torch.tensor(scoring.labels)
    own = target.model(inputs[1]).argmax(1).eq(labels).double().mean()
    for other, (name, rank) in enumerate(zip(group.networks, group.ranks, strict=True)):
        if name == group.networks[place]:
            continue
        x, y = (
            net("abc".index(each)).encode(inputs[0], ["1"])["1"].values.double()
            for each in (name, group.networks[place])
        )
        z = net("abc".index(name)).encode(inputs[1], ["1"])["1"].values.double()
        directions = torch.linalg.svd(x - x.mean(0)).Vh[:rank].T
        known, shown = ((each - x.mean(0)) @ directions for each in (x, z))
        beta = torch.linalg.lstsq(torch.cat([known, torch.ones(len(known), 1)], 1), y).solution
        mapped = torch.cat([shown, torch.ones(len(shown), 1)], 1) @ beta
        logits = target.decode(hf_stitch.Representation(mapped.float(), "bd"), "1")
        accuracy = logits.argmax(1).eq(labels).double().mean()
        assert distances[other] == pytest.approx(1 - float(accuracy / own)), rank


def test_given_distances_are_looked_up() -> None:
    given = np.random.default_rng(0).random((3, 2, 3, 2))
    given[:, :, 2, 1] = np.nan
    found = run(metrics=[], distances={"mine": given}, sensitivity_layers=[])
    (group,) = found.groups
    for number, place in enumerate(group.references):
        own = given["abc".index(group.networks[place]), LAYERS.index(group.layers[place])].ravel()
        compared = group.compared(number, own_network=False)
        np.testing.assert_array_equal(group.distances["mine"][number, compared], own[compared])
    assert found.undefined["mine"] == {"the given distance is NaN": 2}
    with pytest.raises(ValueError, match=r"\(networks, layers, networks, layers\) = \(3, 2, 3, 2\), got \(2, 2\)"):
        run(distances={"mine": np.ones((2, 2))})
    with pytest.raises(ValueError, match=r"names in distances must differ .* got 'depth only'"):
        run(distances={"depth only": given})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "none"}, "pooling must be one of 'mean', 'cls', 'last', 'flatten', got 'none'"),
        ({"layers": {"d": ["1"]}}, "layers contains d, but the networks are a, b, c"),
        ({"metrics": [], "matchers": []}, "at least one metric, matcher or distance"),
        ({"references": 1}, "references must be an integer >= 2, got 1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**options)


class Around(nn.Module):
    """A network with a path around its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) + x)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"functional": ["lstsq"]}, ValueError, "got None; pass task="),
        ({"functional": ["lstsq"], "task": "image"}, ValueError, "no 'image' among tasks"),
        ({"functional": ["lstsq", "lstsq"]}, ValueError, "functional must name each method once"),
        ({"layers": ["1", "9"]}, hf_stitch.NotACutError, "'9'"),
        ({"layers": "13"}, TypeError, r"layers must be a dictionary or a list or None, got '13'; write \['13'\]"),
        ({"layers": {"a": "13"}}, TypeError, r"layers\['a'\] must be a list, got '13'; write \['13'\]"),
        ({"layers": ["1", "1"]}, ValueError, "layers contains '1' more than once"),
        (
            {"sensitivity_layers": "13"},
            TypeError,
            r"sensitivity_layers must be a list or None, got '13'; write \['13'\]",
        ),
        ({"sensitivity_layers": ["3", "3"]}, ValueError, "sensitivity_layers contains '3' more than once"),
        ({"sensitivity_layers": ["2"]}, ValueError, "sensitivity_layers must be among 1, 3, got '2'"),
        ({"test_data": SAMPLES.take(50)}, ValueError, "100.0% of test_data are also in data"),
    ],
)
def test_what_cannot_give_a_result_is_refused_before_any_work(
    options: dict[str, Any], kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_on_data(*_: Any) -> None:
        raise AssertionError("a network runs on the data")

    monkeypatch.setattr(hf_stitch.Adapter, "preprocess", run_on_data)
    with pytest.raises(kind, match=message):
        run(**options)


@pytest.mark.parametrize("run_all", [bench, hf_stitch.compare_all])
def test_a_single_name_is_not_taken_for_a_list_of_characters(run_all: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("a network is loaded")

    for place in ("hf_stitch_studies.benching.workflow.load", "hf_stitch.analysis.comparison.sides.load_on"):
        monkeypatch.setattr(place, load)
    with pytest.raises(TypeError, match=r"networks must be a dictionary or a list, got 'abc'; write \['abc'\]"):
        run_all("abc", SAMPLES)
    with pytest.raises(TypeError, match="networks must be several networks, got a single Sequential; pass"):
        run_all(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), SAMPLES)
    with pytest.raises(TypeError, match=r"layers must be a dictionary or a list or None, got 'abc'; write \['abc'\]"):
        run_all(["a", "b", "c"], SAMPLES, layers="abc")
    with pytest.raises(TypeError, match=r"layers\['0'\] must be a list, got 'abc'; write \['abc'\]"):
        run_all(["a", "b", "c"], SAMPLES, layers={"0": "abc"})


def test_functional_distances_need_cuts() -> None:
    torch.manual_seed(0)
    several = [hf_stitch.load(Around(), example_inputs=POINTS[:2]) for _ in range(3)]
    options: dict[str, Any] = {"layers": ["first"], "ranks": [2], "probe_epochs": 1, "progress": False}
    assert bench(several, SAMPLES, **options).layers == ("first",)  # distances of activations need none
    with pytest.raises(hf_stitch.NotACutError, match="first"):
        bench(several, SAMPLES, functional=["lstsq"], task="image-classification", **options)


def test_a_matcher_that_is_undefined_for_some_pairs_spares_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """15 samples are too few to map the 20 features of one network."""
    wide = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2))
    several = [net(0), net(1), hf_stitch.load(wide, example_inputs=POINTS[:2])]
    calls, original = [], workflow.stitch_grid

    def counted(*given: Any, **options: Any) -> Any:
        calls.append([matcher.label for matcher in options["matchers"]])
        return original(*given, **options)

    monkeypatch.setattr(workflow, "stitch_grid", counted)
    found = bench(
        several, SAMPLES, layers=["3"], metrics=[], functional=["lstsq", "identity"], task="image-classification",
        functional_samples=15, sensitivity_layers=[], references=3, probe_epochs=1, progress=False,
    )  # fmt: skip
    (group,) = found.groups
    missing = {name: np.isnan(group.distances[f"{name}, functional"]).sum() - 3 for name in ("lstsq", "identity")}
    assert missing == {"lstsq": 2, "identity": 0} and list(found.undefined) == ["lstsq, functional"]
    # Each of 3 references with each of 2 other networks once, and each matcher alone where one is undefined.
    assert sorted(calls) == sorted([["lstsq", "identity"]] * 6 + [["lstsq"], ["identity"]] * 2)


def test_a_network_from_which_all_stitches_diverge_spares_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_stitch.training import DivergedError, TaskLoss

    several, original = [net(seed) for seed in range(3)], workflow.stitch_grid

    def diverging(a: Any, *given: Any, **options: Any) -> Any:
        if a is several[1] and any(isinstance(matcher, TaskLoss) for matcher in options["matchers"]):
            raise DivergedError("no stitch of the matcher is left")
        return original(a, *given, **options)

    monkeypatch.setattr(workflow, "stitch_grid", diverging)
    training = TaskLoss(max_steps=1)
    found = bench(
        several, SAMPLES, layers=["3"], metrics=[], functional=["identity", training], task="image-classification",
        sensitivity_layers=[], references=3, probe_epochs=1, progress=False,
    )  # fmt: skip
    assert found.undefined == {f"{training.label}, functional": {"no stitch of the matcher is left": 2}}


def test_a_method_that_is_undefined_for_all_pairs_of_a_test_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"mine is undefined for all 10 pairs of the specificity .* is NaN"):
        run(metrics=[], distances={"mine": np.full((3, 2, 3, 2), np.nan)}, sensitivity_layers=[])
    with pytest.raises(ValueError, match=r"lstsq, functional is undefined for all 10 pairs .* at least 7 rows, got 5"):
        run(functional=["lstsq"], functional_samples=5, task="image-classification", sensitivity_layers=[])


def test_the_recipe_has_what_decides_the_scores() -> None:
    found = run(ranks=iter([2]), references=2, sensitivity_layers=["3"], test_size=40)
    expected = {"ranks": [2], "references": 2, "sensitivity_layers": ["3"], "test_size": 40}
    assert {key: found.to_dict()["recipe"][key] for key in expected} == expected
    assert len(found.groups[0].layers) == 3 * 2


def test_wrong_networks_and_samples_are_named() -> None:
    several = [net(seed) for seed in range(3)]
    with pytest.raises(ValueError, match=r"require labels.*Samples\.of\(data, label="):
        bench(several, POINTS, layers=LAYERS, progress=False)
    with pytest.raises(ValueError, match="at least three networks"):
        bench(several[:2], SAMPLES, layers=LAYERS, progress=False)
    saved = Activations({"1": torch.randn(9, 2)}, range(9))
    with pytest.raises(TypeError, match=r"networks\['c'\] must be a network .*, got Activations: a stitched model"):
        bench({"a": several[0], "b": several[1], "c": saved}, SAMPLES)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="functional must be a list"):
        run(functional="lstsq")


def test_the_command_writes_scores_and_figure(tmp_path: Path) -> None:
    digits = hf_stitch.Samples.of(read_data("sklearn:digits", split="test"))
    for seed in range(3):
        networks.save(networks.build("cnn", seed, digits), tmp_path / str(seed))
    named = [str(tmp_path / str(seed)) for seed in range(3)]
    common = ["--data", "sklearn:digits", "--split", "test", "--max-samples", "200"]
    options = ["--layer", "layer1.0", "--layer", "layer2.0", "--rank", "4", "--matcher", "ridge:ridge=0.5"]
    result = CliRunner().invoke(
        app,
        [
            "bench",
            *named,
            "--metric",
            "procrustes",
            "--metric",
            "rsa",
            *common,
            *options,
            "--out",
            f"{tmp_path}/out",
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert list(record["scores"]["sensitivity"]) == [
        "procrustes", "rsa", "ridge(ridge=0.5), structural", "depth only", "rank only",
        "probing, other half",
    ]  # fmt: skip
    assert Bench.load(tmp_path / "out" / "bench.json").n == 20 and (tmp_path / "out" / "bench.png").is_file()
    wrong = CliRunner().invoke(app, ["bench", *named, "--metric", "procrustis", *common])
    assert wrong.exit_code == 2 and "'procrustis'" in wrong.output
    few = CliRunner().invoke(app, ["bench", *named[:2], *common])
    assert few.exit_code == 2 and "at least three different networks" in few.output


def test_an_undefined_interval_is_not_printed() -> None:
    assert _format_score(Score(0.3333, math.nan, math.nan)) == "0.33"
    assert _format_score(Score(0.3333, 0.1, 0.5)) == "0.33 [0.10, 0.50]"
    assert _format_score(Score(math.nan, math.nan, math.nan)) == "–"
