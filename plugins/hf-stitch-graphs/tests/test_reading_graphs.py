"""Graphs are read from arrays, checked, and reduced to some of their nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hf_stitch_graphs import Graph, read_planetoid
from made_graphs import graph


def write(folder: Path, **further: np.ndarray) -> None:
    masks = {f"{part}_mask": np.array([part == "train", False, part == "test"]) for part in ("train", "val", "test")}
    np.savez(
        folder / "cora.npz",
        x_data=np.array([1, 1, 2], "float32"), x_indices=np.array([1, 0, 3]), x_indptr=np.array([0, 1, 3, 3]),
        x_shape=np.array([3, 4]), edge_index=np.array([[0, 1], [1, 0]]), y=np.array([2, 0, 0]),
        has_label=np.array([True, True, False]), **masks, **further,
    )  # fmt: skip


def test_a_citation_graph_is_read(tmp_path: Path) -> None:
    write(tmp_path)
    found = read_planetoid(tmp_path, "cora")
    assert found.x.tolist() == [[0, 1, 0, 0], [1, 0, 0, 2], [0, 0, 0, 0]]
    assert found.y is not None and found.y.tolist() == [2, 0, -1]
    assert found.masks["test"].tolist() == [False, False, True]
    assert found.normalized().x.sum(1).tolist() == pytest.approx([1, 1, 0])
    known = found.induced(found.y >= 0)
    assert known.samples().labels == [2, 0] and known.edge_index.tolist() == [[0, 1], [1, 0]]


def test_incomplete_and_missing_files_are_named(tmp_path: Path) -> None:
    write(tmp_path, has_x=np.array([True, False, False]))
    with pytest.raises(ValueError, match=r"cora\.npz lacks the features of 2 of 3 nodes"):
        read_planetoid(tmp_path, "cora")
    with pytest.raises(FileNotFoundError, match=r"citeseer\.npz does not exist"):
        read_planetoid(tmp_path, "citeseer")


def test_an_induced_graph_keeps_nodes_edges_and_ids() -> None:
    whole = graph(30)
    nodes = torch.tensor([7, 3, 20, 11])
    some = whole.induced(nodes)
    assert torch.equal(some.x, whole.x[nodes]) and some.samples().ids == (7, 3, 20, 11)
    kept = {(int(nodes[a]), int(nodes[b])) for a, b in some.edge_index.T.tolist()}
    chosen = set(nodes.tolist())
    assert kept == {(a, b) for a, b in whole.edge_index.T.tolist() if {a, b} <= chosen}
    assert some.induced(torch.tensor([2, 1])).samples().ids == (20, 3)
    with pytest.raises(ValueError, match="nodes must not be repeated"):
        whole.induced(torch.tensor([1, 1]))


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"edge_index": torch.tensor([[0], [3]])}, "edges must be from 0 to 2, got 0 to 3"),
        ({"y": torch.tensor([0])}, "y must have one value per node .3"),
        ({"x": torch.ones(3)}, "x must have shape"),
    ],
)
def test_shapes_are_checked(parts: dict[str, torch.Tensor], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Graph(**{"x": torch.ones(3, 2), "edge_index": torch.tensor([[0], [1]]), **parts})
