"""Stitched models of graph networks are scored, saved, loaded bit for bit, and put on other graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_stitch_graphs import GraphClassifier, NodeNetwork, create, dense, on_graph
from made_graphs import CLASSES, FEATURES, graph
from torch_geometric.nn import GCN

import hf_stitch
from hf_stitch.registry import PluginError

NODES = graph(60)
SIZES = {"in_channels": FEATURES, "num_layers": 2, "out_channels": CLASSES}


def networks() -> list[NodeNetwork]:
    torch.manual_seed(0)
    kinds = ("GCN", {"hidden_channels": 8}), ("GraphSAGE", {"hidden_channels": 12, "num_layers": 3})
    return [NodeNetwork(create(kind, **{**SIZES, **sizes}), NODES).eval() for kind, sizes in kinds]


@pytest.mark.filterwarnings("ignore:the stitching layer was fitted to 100:UserWarning")
@pytest.mark.filterwarnings("ignore:target= differs from the target of the stitched model:UserWarning")
def test_a_stitched_model_is_saved_loaded_and_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = networks()
    everything = NODES.samples()
    stitched = hf_stitch.stitch(
        a, b, everything, source_layer="net.convs.0", target_layer="net.convs.1", matcher="ridge",
        test_data=everything, batch_size=60, progress=False,
    )  # fmt: skip
    stitched.save_pretrained(tmp_path / "model")
    stitched.stitcher.save_pretrained(tmp_path / "stitcher")
    loaded = hf_stitch.StitchedModel.from_pretrained(tmp_path / "model")
    attached = hf_stitch.Stitcher.from_pretrained(tmp_path / "stitcher").attach(source=a, target=b)
    for each in (loaded, attached):
        assert torch.equal(each(x=NODES.x).logits, stitched(x=NODES.x).logits)
    scores = hf_stitch.evaluate(loaded, everything, target=b, batch_size=60, progress=False)
    assert scores["accuracy"].value == stitched.evaluation["accuracy"].value
    some = NODES.induced(torch.arange(20, 60))
    moved = on_graph(loaded, some)
    assert hf_stitch.evaluate(moved, some.samples(), target=on_graph(b, some), batch_size=40, progress=False).n == 40
    again = hf_stitch.load(tmp_path / "model")
    assert {"source.net.convs.0", "target.net.convs.2"} <= set(again.layers)
    monkeypatch.setitem(vars(hf_stitch.registries.adapters), "_plugins", {})
    with pytest.raises(PluginError, match=r"pyg.*hf-stitch-graphs.*pip install hf-stitch-graphs"):
        hf_stitch.StitchedModel.from_pretrained(tmp_path / "model")


def test_classifiers_of_graphs_are_stitched_and_saved(tmp_path: Path) -> None:
    graphs = [graph(5 + number % 5, number) for number in range(40)]
    torch.manual_seed(0)
    a, b = (
        GraphClassifier(create(kind, in_channels=FEATURES, hidden_channels=8, num_layers=2), FEATURES, 9, 8, 2).eval()
        for kind in ("GIN", "GAT")
    )
    rows = dense(graphs, 9)
    samples = hf_stitch.Samples.of(rows, label=[number % 2 for number in range(40)])
    stitched = hf_stitch.stitch(
        a, b, samples, source_layer="pooled", target_layer="pooled", matcher="ridge", progress=False
    )
    stitched.save_pretrained(tmp_path)
    loaded = hf_stitch.StitchedModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(graphs=rows).logits, stitched(graphs=rows).logits)


def test_networks_of_unknown_arguments_run_and_are_not_saved(tmp_path: Path) -> None:
    net = NodeNetwork(GCN(FEATURES, 8, 2, CLASSES), NODES).eval()
    everything = NODES.samples()
    stitched = hf_stitch.stitch(
        net, net, everything, source_layer="net.convs.0", target_layer="net.convs.0", test_data=everything,
        matcher="identity", batch_size=60, task=None, progress=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"this GCN cannot be rebuilt.*hf_stitch_graphs\.create\('GCN', …\)"):
        stitched.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="name must be one of DeepGNN, GAT, GCN, GIN, GraphSAGE, got 'GCNN'"):
        create("GCNN")


def test_only_networks_of_nodes_are_put_on_a_graph() -> None:
    with pytest.raises(ValueError, match="Linear must contain a NodeNetwork"):
        on_graph(torch.nn.Linear(2, 2), NODES)
    wider = graph(10)
    wider = type(wider)(torch.cat([wider.x, wider.x], 1), wider.edge_index)
    with pytest.raises(ValueError, match="must have 6 features, got 12"):
        on_graph(networks()[0], wider)
