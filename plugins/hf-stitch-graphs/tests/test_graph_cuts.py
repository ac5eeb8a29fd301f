"""Networks of torch_geometric fulfil the contract of adapters, and cuts are where nothing passes around."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_stitch_graphs import GraphClassifier, NodeNetwork, TorchGeometricAdapter, create, dense, on_graph
from hf_stitch_testing import check_adapter, check_override
from made_graphs import CLASSES, FEATURES, graph
from torch import nn
from torch_geometric.nn import GCN

import hf_stitch
from hf_stitch import registries
from hf_stitch.adapters.examples import ExampleError

NODES = graph(40)
SIZES = {"in_channels": FEATURES, "hidden_channels": 8, "num_layers": 3, "out_channels": CLASSES}
CONVS = ("net.convs.0", "net.convs.1", "net.convs.2")
RESIDUAL = ("net.first", "net.act", "net.convs.2", "net.acts.2")
NETWORKS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "GCN": ("GCN", {}, CONVS),
    "GCN with norms": ("GCN", {"norm": "batch_norm"}, (CONVS[0], "net.norms.0", CONVS[1], "net.norms.1", CONVS[2])),
    "GCN with jumping knowledge": ("GCN", {"jk": "cat"}, ("rows", CONVS[0], "net.norms.0", "net.jk")),
    "GraphSAGE": ("GraphSAGE", {}, CONVS),
    "GIN": ("GIN", {}, CONVS),
    "GAT": ("GAT", {"heads": 2}, CONVS),
    "GATv2": ("GAT", {"v2": True}, CONVS),
    **{f"deep {conv}": ("DeepGNN", {"conv": conv}, CONVS) for conv in ("gcn", "gin", "gat", "sage")},
    "GCNII": ("DeepGNN", {"conv": "gcn2"}, ("rows", *RESIDUAL)),
}
"""Name -> class, further arguments, and cuts."""


def network(name: str, seed: int = 0) -> NodeNetwork:
    torch.manual_seed(seed)
    kind, arguments, _ = NETWORKS[name]
    return NodeNetwork(create(kind, **SIZES, **arguments), NODES).eval()


def test_the_adapter_is_registered() -> None:
    assert registries.adapters.get("pyg") is TorchGeometricAdapter


@pytest.mark.parametrize("name", NETWORKS)
def test_every_architecture_fulfils_the_contract(name: str) -> None:
    adapter = hf_stitch.load(network(name))
    assert adapter.layers == NETWORKS[name][2]
    check_adapter(adapter, {"x": NODES.x})
    assert {adapter.spec(layer).layout for layer in adapter.layers} == {"bd"}


@pytest.mark.parametrize("name", NETWORKS)
def test_identity_stitching_is_exact(name: str) -> None:
    adapter = hf_stitch.load(network(name))
    everything = NODES.samples()
    for layer in adapter.layers:
        stitched = hf_stitch.stitch(
            adapter, adapter, everything, source_layer=layer, target_layer=layer, matcher="identity", task=None,
            test_data=everything, batch_size=40, progress=False,
        )  # fmt: skip
        assert torch.equal(stitched(x=NODES.x), adapter.forward(NODES.x)), layer


@pytest.mark.parametrize("layer", ["net.convs.0", "net.convs.1", "net.acts.1"])
def test_the_residual_of_gcnii_passes_around_its_middle(layer: str) -> None:
    found = hf_stitch.load(network("GCNII")).verify_cut(layer)
    assert found.status == "refused" and "the output of 'net.act' bypasses it" in found.reason


def test_the_network_is_that_of_torch_geometric() -> None:
    net = network("GCN")
    with torch.no_grad():
        assert torch.equal(net(NODES.x), net.net(NODES.x, NODES.edge_index))
        assert not torch.allclose(net(NODES.x), net.net(NODES.x, NODES.edge_index[:, :2]))


@pytest.mark.parametrize("pool", ["add", "max", "mean"])
@pytest.mark.parametrize("kind", ["GCN", "GraphSAGE", "GIN", "GAT"])
def test_classifiers_of_graphs_fulfil_the_contract(kind: str, pool: str) -> None:
    torch.manual_seed(0)
    net = create(kind, in_channels=FEATURES, hidden_channels=8, num_layers=2)
    classifier = GraphClassifier(net, FEATURES, 9, 8, CLASSES, pool).eval()
    graphs = [graph(5 + number % 5, number) for number in range(12)]
    adapter, batch = hf_stitch.load(classifier), dense(graphs, 9)
    assert adapter.layers == ("pooled", "hidden", "act")
    check_adapter(adapter, {"graphs": batch}, {"graphs": batch[:5]})
    assert adapter.verify_cut("pooled.net.convs.0").status == "refused"
    with torch.no_grad():
        pooled = adapter.encode(batch, "pooled")["pooled"].values
        for row, one in zip(pooled, graphs, strict=True):
            reduced = {"add": torch.sum, "max": torch.amax, "mean": torch.mean}[pool](net(one.x, one.edge_index), 0)
            torch.testing.assert_close(row, reduced)


def test_the_override_of_classifiers_fulfils_the_contract() -> None:
    net = create("GIN", in_channels=FEATURES, hidden_channels=8, num_layers=2)
    override = registries.overrides.get("hf_stitch_graphs.GraphClassifier")()
    check_override(override, GraphClassifier(net, FEATURES, 9, 8, CLASSES).eval(), {"graphs": dense([graph(7)] * 3, 9)})


def test_a_batch_is_the_whole_graph() -> None:
    net = network("GCN")
    with pytest.raises(ValueError, match="all 40 nodes of the graph in order, got 16: set batch_size=40"):
        hf_stitch.compare(net, net, NODES.samples(), batch_size=16, progress=False)
    with pytest.raises(ValueError, match="must be the features of the network's graph in order"):
        net(NODES.x.flip(0))
    other = on_graph(net, NODES.induced(torch.arange(40).flip(0)))
    torch.testing.assert_close(other(NODES.x.flip(0)).flip(0), net(NODES.x))


def test_rows_in_half_precision_are_those_of_the_graph() -> None:
    assert network("GCN").bfloat16()(NODES.x.bfloat16()).shape == (40, CLASSES)


def test_networks_without_a_graph_are_refused() -> None:
    with pytest.raises(
        ExampleError, match=r"GCN also requires edges: pass hf_stitch_graphs\.NodeNetwork\(net, graph\)"
    ):
        hf_stitch.load(GCN(3, 4, 2))
    with pytest.raises(ValueError, match="more than 4 nodes, got 4"):
        NodeNetwork(nn.Identity(), graph(4))
