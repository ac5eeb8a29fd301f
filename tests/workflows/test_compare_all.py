"""Many networks compared at once have the atlases of their pairs, and each network runs once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.cluster import hierarchy
from scipy.spatial.distance import pdist, squareform
from torch import nn

import hf_stitch
from hf_stitch.analysis import NetworkAtlas, identify_layers
from hf_stitch.plots import dendrogram, distance_map

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
                np.testing.assert_allclose(between.values[metric], values, rtol=1e-9, atol=1e-9, err_msg=f"{a} {b}")


def test_grids_of_other_sizes_are_compared_by_position() -> None:
    images = torch.randn(12, 3, 32, 32, dtype=torch.float64)
    networks = [network("cnn", seed, "float64") for seed in (0, 1)]
    layers = ["layer1.0", "layer3.0"]
    found = hf_stitch.compare_all(networks, images, layers=layers, pooling="none", progress=False)
    one = hf_stitch.compare(*networks, images, layers_a=layers, layers_b=layers, pooling="none", progress=False)
    np.testing.assert_allclose(found.between("0", "1")["linear_cka"], one["linear_cka"], rtol=1e-9)


def test_each_network_runs_once_per_batch() -> None:
    networks, counts = [net(seed) for seed in range(4)], [0] * 4

    def count(number: int) -> Any:
        def add(*_: Any) -> None:
            counts[number] += 1

        return add

    for number, each in enumerate(networks):
        _ = each.layers
        each.model.register_forward_pre_hook(count(number))
    hf_stitch.compare_all(networks, POINTS, layers=["1", "3"], batch_size=30, progress=False)
    assert counts == [3 + 1] * 4  # three batches, and one of two samples before them


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
    for figure in (found.plot(), found.plot_dendrogram(), found.plot_map("procrustes")):
        assert figure.axes
    assert "twin" in str(found)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="at least two networks, got 1"):
        hf_stitch.compare_all([net(0)], POINTS)
    with pytest.raises(ValueError, match="layers names d, but the networks are a, b"):
        hf_stitch.compare_all({"a": net(0), "b": net(1)}, POINTS, layers={"d": ["1"]})
    found = hf_stitch.compare_all([net(0), net(1)], POINTS, layers=["1"], progress=False)
    with pytest.raises(KeyError, match="no network '7'; there are 0, 1"):
        found.between("7", "0")


def test_a_map_keeps_distances_in_the_plane_and_a_dendrogram_its_tree() -> None:
    points = np.random.default_rng(0).standard_normal((6, 2))
    distances, labels = squareform(pdist(points)), list("abcdef")
    drawn = distance_map(distances, labels, label="d").axes[0]
    np.testing.assert_allclose(pdist(drawn.collections[0].get_offsets()), pdist(points), atol=1e-9)
    assert "100%" in drawn.get_xlabel()
    leaves = hierarchy.leaves_list(hierarchy.linkage(pdist(points), "average"))
    shown = [tick.get_text() for tick in dendrogram(distances, labels).axes[0].get_yticklabels()]
    assert shown == [labels[i] for i in leaves]
    with pytest.raises(ValueError, match="finite and symmetric"):
        dendrogram([[0, 1], [2, 0]], ["a", "b"])
