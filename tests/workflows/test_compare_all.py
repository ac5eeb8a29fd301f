"""Many networks compared at once have the atlases of their pairs, and each network runs once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hf_stitch
from hf_stitch.analysis import Activations, NetworkAtlas, identify_layers

from tiny_networks import network  # isort: skip

POINTS = torch.randn(90, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
METRICS = ["linear_cka:debiased=True", "procrustes", "linear_regression"]


def net(seed: int, width: int = 6) -> hf_stitch.Adapter:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return hf_stitch.load(model, example_inputs=POINTS[:2])


def test_atlases_are_those_of_the_pairs() -> None:
    networks = {"a": net(0), "b": net(1, 7), "c": net(2)}
    layers = {"a": ["1", "3"], "b": ["1", "3", "4"], "c": ["3"]}
    found = hf_stitch.compare_all(networks, POINTS, layers=layers, metrics=METRICS, batch_size=32, progress=False)
    assert found.layers == {name: tuple(own) for name, own in layers.items()}
    for a in networks:
        for b in networks:
            one = hf_stitch.compare(
                networks[a], networks[b], POINTS, layers_a=layers[a], layers_b=layers[b], metrics=METRICS,
                progress=False,
            )  # fmt: skip
            between = found.between(a, b)
            assert (between.layers_a, between.layers_b) == (one.layers_a, one.layers_b)
            for metric, values in one.values.items():
                atol = 5e-8 if metric == "procrustes" else 1e-9  # a distance of 0 is the root of a rounding error
                np.testing.assert_allclose(between.values[metric], values, rtol=1e-9, atol=atol, err_msg=f"{a} {b}")


def test_grids_of_other_sizes_are_compared_by_position() -> None:
    images = torch.randn(12, 3, 32, 32, dtype=torch.float64)
    networks = [network("cnn", seed, "float64") for seed in (0, 1)]
    layers = ["layer1.0", "layer3.0"]
    found = hf_stitch.compare_all(networks, images, layers=layers, rows="resized", progress=False)
    one = hf_stitch.compare(*networks, images, layers_a=layers, layers_b=layers, rows="resized", progress=False)
    np.testing.assert_allclose(found.between("0", "1")["linear_cka"], one["linear_cka"], rtol=1e-9)


def test_networks_are_alike_by_their_most_similar_layers_and_identified(tmp_path: Any) -> None:
    networks = {"a": net(0), "twin": net(0), "other": net(5)}
    found = hf_stitch.compare_all(networks, POINTS, layers=["1", "3"], metrics=METRICS[:2], progress=False)
    for metric, best in ((METRICS[0], np.max), ("procrustes", np.min)):
        pair = found.between("a", "other")[metric]
        expected = (best(pair, axis=1).mean() + best(pair, axis=0).mean()) / 2
        assert found.similarities(metric)[0, 2] == pytest.approx(expected)
        distances = found.distances(metric)
        assert distances[0, 1] == pytest.approx(0, abs=1e-6) and distances[0, 2] > 0.01
        assert (np.diag(distances) == 0).all()
    pairs = {(a, b): found.between(a, b)["procrustes"] for a, b in (("a", "twin"), ("a", "other"), ("twin", "other"))}
    expected = identify_layers(pairs, higher_is_better=False, layers=["1", "3"])
    assert found.identify("procrustes").to_dict() == expected.to_dict()
    found.save(tmp_path / "all.json")
    assert NetworkAtlas.load(tmp_path / "all.json").to_pandas().equals(found.to_pandas())
    assert len(found.to_pandas()) == 2 * 6 * 6
    assert found.plot().axes
    assert "twin" in str(found)
    with pytest.raises(KeyError, match="one of a, twin, other, got '7'"):
        found.between("7", "a")


@pytest.mark.parametrize("metric", ["linear_cka:debiased=True", "pwcca", "mutual_knn:k=3"])
def test_a_corresponding_layer_that_is_not_told_from_the_best_is_a_tie(metric: str, tmp_path: Any) -> None:
    """Layers 1 and 2 of a network are nearly the same, layers 0 and 3 are others."""
    g = np.random.default_rng(0)
    base = [g.standard_normal((90, 4)) for _ in range(3)]
    networks = {}
    for name in "pqr":
        middle = base[1] + 0.4 * g.standard_normal((90, 4))
        rows = {
            "0": base[0], "1": middle, "2": middle + 0.02 * g.standard_normal((90, 4)), "3": np.roll(base[2], 7, 0)
        }  # fmt: skip
        if name == "r":
            rows["0"], rows["3"] = rows["3"], rows["0"]
        noisy = {k: torch.from_numpy(v + 0.3 * g.standard_normal((90, 4))) for k, v in rows.items()}
        networks[name] = Activations(noisy, range(90), pooling="mean")
    found = hf_stitch.compare_all(networks, metrics=[metric], resamples=10, seed=1, progress=False)
    identified = found.identify()
    assert identified.tested
    verdicts = identified.verdicts("a")
    assert verdicts[0, [0, 3]].tolist() == ["hit", "hit"]
    assert verdicts[1:, [0, 3]].tolist() == [["miss", "miss"]] * 2
    assert set(verdicts[:, 1:3].ravel()) <= {"hit", "tie"} and "tie" in verdicts
    plain = hf_stitch.compare_all(networks, metrics=[metric], progress=False)
    assert not plain.p_values and set(plain.identify().verdicts("a").ravel()) <= {"hit", "miss"}
    assert (plain.identify().hits["b"] == identified.hits["b"]).all()
    assert (found.identify(level=1e-9).ties["a"] >= identified.ties["a"]).all()
    found.save(tmp_path / "all.json")
    again = NetworkAtlas.load(tmp_path / "all.json")
    assert again.identify().to_dict() == identified.to_dict() and again.identify().plot().axes
    same = hf_stitch.compare_all(networks, metrics=[metric], resamples=10, seed=1, batch_size=17, progress=False)
    (label,) = found.p_values
    np.testing.assert_allclose(same.p_values[label], found.p_values[label], rtol=1e-7)


def test_undefined_pairs_are_left_out_of_everything() -> None:
    g = torch.Generator().manual_seed(0)
    rows = {name: {str(i): torch.randn(60, 3, generator=g) for i in range(3)} for name in "pqr"}
    rows["q"]["1"] = torch.full((60, 3), 0.1)
    networks = {name: Activations(own, range(60)) for name, own in rows.items()}
    found = hf_stitch.compare_all(networks, metrics=["linear_cka", "cca"], resamples=5, progress=False)
    for metric in ("linear_cka", "cca"):
        between = found.between("p", "q")
        assert np.isnan(between[metric][:, 1]).all() and not np.isnan(between[metric][:, [0, 2]]).any()
        assert set(between.undefined) == {f"{m}: {i} -> 1" for m in ("linear_cka", "cca") for i in range(3)}
        assert set(between.best_matches(metric, "b")) == {"0", "2"}
        assert found.between("p", "r").undefined == {}
        expected = (np.nanmax(between[metric], 1).mean() + between[metric][:, [0, 2]].max(0).mean()) / 2
        assert found.similarities(metric)[0, 1] == pytest.approx(expected)
        identified = found.identify(metric)
        assert identified.verdicts("a")[0, 1] == identified.verdicts("b")[2, 1] == "undefined"
        assert (identified.verdicts("a") != "undefined").sum() == 9 - 2
        assert found.plot(metric).axes
    assert "undefined for 17 of 81 pairs" in str(found)
    assert found.to_pandas()["undefined"].notna().sum() == 2 * 17
    only = {"p": networks["p"], "dead": Activations({"1": rows["q"]["1"]}, range(60))}
    with pytest.raises(ValueError, match="linear_cka is undefined for all pairs of layers of 'p' and 'dead'"):
        hf_stitch.compare_all(only, progress=False).distances()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resamples": 1}, "from 2 to the number of samples, 90, got 1"),
        ({"resamples": 91}, "from 2 to the number of samples, 90, got 91"),
        ({"resamples": 9, "rows": "resized"}, "one row per sample: use rows='mean'"),
        ({"resamples": 9, "layers": {"a": ["1"], "b": ["1", "3"]}}, r"equally many layers, got \[1, 2\]; pass layers"),
        ({"networks": [net(0)]}, "at least two networks, got 1"),
        ({"layers": {"d": ["1"]}}, "layers contains d, but the networks are a, b"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_stitch.compare_all(**{"networks": {"a": net(0), "b": net(1)}, "data": POINTS, **options})
