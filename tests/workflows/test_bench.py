"""The bench on networks: each runs once, stitched models are scored, and the command writes what the function finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hf_stitch
from hf_stitch.analysis import Activations, Bench, linear_probe
from hf_stitch.cli import app, networks
from hf_stitch.data import read_data

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
    return hf_stitch.bench({name: net(i) for i, name in enumerate("abc")}, SAMPLES, **options)


def test_each_network_runs_once_per_batch() -> None:
    several, counts = [net(seed) for seed in range(3)], [0] * 3

    def count(number: int) -> Any:
        def add(*_: Any) -> None:
            counts[number] += 1

        return add

    for number, each in enumerate(several):
        _ = each.layers  # verified with forwards of their own
        each.model.register_forward_pre_hook(count(number))
    hf_stitch.bench(several, SAMPLES, layers=LAYERS, batch_size=48, probe_epochs=1, progress=False)
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
    assert "lstsq, functional" not in found.groups[0].distances and found.kinds["lstsq, functional"] == (
        "matcher, functional"
    )


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
    with pytest.raises(ValueError, match="the name of another method, 'depth only'"):
        run(distances={"depth only": given})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "none"}, "pooling must be one of mean, cls, last, flatten"),
        ({"layers": {"d": ["1"]}}, "layers names d, but the networks are a, b, c"),
        ({"metrics": [], "matchers": []}, "at least one metric, matcher or given distance"),
        ({"references": 1}, "references must be at least 2"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**options)


def test_wrong_networks_and_samples_are_named() -> None:
    several = [net(seed) for seed in range(3)]
    with pytest.raises(ValueError, match=r"data has no labels.*Samples\.of\(data, label="):
        hf_stitch.bench(several, POINTS, layers=LAYERS, progress=False)
    with pytest.raises(ValueError, match="at least three networks"):
        hf_stitch.bench(several[:2], SAMPLES, layers=LAYERS, progress=False)
    saved = Activations({"1": torch.randn(9, 2)}, range(9))
    with pytest.raises(TypeError, match="must be a network, got Activations"):
        hf_stitch.bench({"a": several[0], "b": several[1], "c": saved}, SAMPLES)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="functional must be a list"):
        run(functional="lstsq")


def test_the_command_writes_scores_and_figure(tmp_path: Path) -> None:
    digits = hf_stitch.Samples.of(read_data("sklearn:digits", split="test"))
    for seed in range(3):
        networks.save(networks.build("cnn", seed, digits), tmp_path / str(seed))
    named = [part for seed in range(3) for part in ("--network", str(tmp_path / str(seed)))]
    common = ["--data", "sklearn:digits", "--split", "test", "--max-samples", "200"]
    options = ["--layer", "layer1.0", "--layer", "layer2.0", "--rank", "4", "--matcher", "ridge:ridge=0.5"]
    result = CliRunner().invoke(
        app, ["bench", "procrustes", "rsa", *named, *common, *options, "--out", str(tmp_path / "out"), "--json"]
    )
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert list(record["scores"]["sensitivity"]) == [
        "procrustes", "rsa", "ridge(ridge=0.5), structural", "depth only", "rank only",
        "probing, other half",
    ]  # fmt: skip
    assert Bench.load(tmp_path / "out" / "bench.json").n == 20 and (tmp_path / "out" / "bench.png").is_file()
    wrong = CliRunner().invoke(app, ["bench", "procrustis", *named, *common])
    assert wrong.exit_code == 2 and "'procrustis'" in wrong.output
    few = CliRunner().invoke(app, ["bench", "procrustes", *named[:4], *common])
    assert few.exit_code == 2 and "at least three different networks" in few.output
