"""Which vectors of a sample are rows: each kind by hand, and what a comparison refuses, warns of, and records."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hf_stitch
from hf_stitch import Adapter, Samples, SimilarityAtlas
from hf_stitch.analysis import Activations
from hf_stitch.metrics import linear_cka

QUIET: dict[str, Any] = {"progress": False}


def by_hand(adapter: Adapter, samples: Any, rows: str, layer: str) -> Tensor:
    """The rows of a layer from its activations, without :class:`Representation`."""
    (batch,) = Samples.of(samples).batches(40)
    with torch.no_grad():
        values = adapter.encode(adapter.preprocess(batch.samples), layer)[layer].values.double()
    if values.dim() == 4:  # samples, channels, height, width
        flat = {"flat": values.flatten(1), "mean": values.mean((2, 3))}
        return flat.get(rows, values.permute(0, 2, 3, 1).flatten(0, 2))
    inner = values[:, 1:]
    found = {"flat": inner.flatten(1), "mean": inner.mean(1), "cls": values[:, 0], "last": values[:, -1]}
    return found.get(rows, (values if rows == "tokens" else inner).flatten(0, 1))


@pytest.mark.parametrize("rows", ["flat", "positions", "resized", "mean", "tokens", "cls", "last"])
@pytest.mark.parametrize("kind", ["cnn", "vit"])
def test_each_kind_of_rows_by_hand(kind: str, rows: Any, net: Any, images: Tensor) -> None:
    a, b, few = net(kind), net(kind, 1), images[:40]
    layers = a.layers[1:3] if kind == "vit" else a.layers[:1]
    metric = "linear_cka:debiased=True"  # biased, independent rows of such widths score as much
    given: dict[str, Any] = {
        "layers_a": layers, "layers_b": layers, "rows": rows, "metrics": [metric], "batch_size": 7, **QUIET
    }  # fmt: skip
    if kind == "cnn" and rows in ("cls", "last"):
        with pytest.raises(ValueError, match=rf"layer '{layers[0]}' of a: rows='{rows}' is undefined"):
            hf_stitch.compare(a, b, few, **given)
        return
    found = hf_stitch.compare(a, b, few, **given)
    assert found.rows == found.recipe["rows"] == rows and found.basis == f"40 samples, rows: {rows}"
    of_a, of_b = ([by_hand(network, few, rows, layer) for layer in layers] for network in (a, b))
    wanted = [[linear_cka(x, y, debiased=True) for y in of_b] for x in of_a]
    np.testing.assert_allclose(found["linear_cka"], np.array(wanted), rtol=1e-6, atol=1e-8)


def test_positions_of_other_grids_are_undefined_and_resized_warns(net: Any, images: Tensor) -> None:
    cnn = net("cnn")
    layers, grids = cnn.layers[:3], [cnn.spec(layer).grid for layer in cnn.layers[:3]]
    given: dict[str, Any] = {"layers_a": layers, "layers_b": layers, **QUIET}
    found = hf_stitch.compare(cnn, net("cnn", 1), images, rows="positions", **given)
    equal = np.array([[a == b for b in grids] for a in grids])
    assert not equal.all() and np.array_equal(np.isnan(found["linear_cka"]), ~equal)
    assert len(found.undefined) == (~equal).sum() and "equal positions" in next(iter(found.undefined.values()))
    with pytest.warns(UserWarning, match="positions of equal grids and resized positions"):
        resized = hf_stitch.compare(cnn, net("cnn", 1), images, rows="resized", **given)
    np.testing.assert_allclose(
        resized["linear_cka"][equal], found["linear_cka"][equal], rtol=1e-12
    )  # other blocks of rows
    again = SimilarityAtlas.from_dict(found.to_dict())
    assert again.rows == "positions" and str(again) == str(found)
    apart = [layers[grids.index(grid)] for grid in dict.fromkeys(grids)][:2]
    with pytest.raises(ValueError, match="use rows='resized' to resize grids"):
        hf_stitch.compare(cnn, net("cnn", 1), images, rows="positions", layers_a=apart[:1], layers_b=apart[1:], **QUIET)


def test_vectors_beside_pooled_positions_warn() -> None:
    random = torch.Generator().manual_seed(0)
    values = {"vector": torch.randn(20, 3, generator=random), "tokens": torch.randn(20, 4, 3, generator=random)}
    saved = Activations(values, range(20))
    with pytest.warns(UserWarning, match="layers that output vectors and the mean of layers"):
        hf_stitch.compare(saved, saved, rows="mean", **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_stitch.compare(saved, saved, rows="mean", layers_a=["tokens"], layers_b=["tokens"], **QUIET)
    with pytest.warns(UserWarning, match="layers that output vectors and positions of layers"):
        mixed = hf_stitch.compare(saved, saved, rows="positions", **QUIET)
    assert np.array_equal(np.isnan(mixed["linear_cka"]), ~np.eye(2, dtype=bool))
    with pytest.raises(ValueError, match="requires a fixed length"):
        hf_stitch.compare(saved, saved, rows="flat", **QUIET)
    grid = Activations({"vector": values["vector"], "grid": values["tokens"]}, range(20), grids={"grid": (2, 2)})
    with pytest.warns(UserWarning, match="layers that output vectors and resized of layers"):  # and no third kind
        hf_stitch.compare(grid, grid, rows="resized", **QUIET)
    kept = Activations({"tokens": values["tokens"]}, range(20), pooling="none")
    with pytest.raises(ValueError, match="rows='tokens' requires prefix tokens"):
        hf_stitch.compare(kept, kept, rows="tokens", **QUIET)


def masked(seed: int, real: list[int], **others: Tensor) -> Activations:
    """A layer of texts with so many real tokens, and other layers."""
    values = torch.randn(len(real), 4, 3, generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(4) < torch.tensor(real)[:, None]
    return Activations({**others, "text": values}, range(len(real)), mask=mask, grids=dict.fromkeys(others, (2, 2)))


@pytest.mark.parametrize("rows", ["positions", "tokens", "resized"])
def test_other_tokens_are_refused_whatever_else_is_compared(rows: Any) -> None:
    grid = torch.randn(20, 4, 3, generator=torch.Generator().manual_seed(2))
    a, b = masked(0, [1, 3] * 10, grid=grid), masked(1, [3, 1] * 10, grid=grid)  # as many tokens, of other samples
    for found in (
        lambda: hf_stitch.compare(a, b, rows=rows, **QUIET),
        lambda: hf_stitch.compare_all({"a": a, "b": b}, rows=rows, **QUIET),
    ):
        with pytest.raises(ValueError, match="requires the same tokens on both sides"):
            found()


def test_one_tensor_under_two_masks_is_compared_twice() -> None:
    a, b = masked(0, [4] * 20), masked(0, [2] * 20)
    assert torch.equal(a.values["text"], b.values["text"])
    b.values["text"].set_(a.values["text"])  # type: ignore[call-overload]
    found = hf_stitch.compare_all({"a": a, "b": b}, **QUIET).between("a", "b")["linear_cka"]
    np.testing.assert_allclose(found, hf_stitch.compare(a, masked(0, [2] * 20), **QUIET)["linear_cka"], rtol=1e-9)
    assert found.item() < 0.99


@pytest.mark.parametrize(
    ("pooling", "rows"),
    [("mean", "mean"), ("flatten", "flat"), ("none", "resized"), ("cls", "cls"), ("last", "last"), (None, None)],
)
def test_results_with_a_pooling_are_read(pooling: Any, rows: Any) -> None:
    atlas = SimilarityAtlas({"linear_cka": np.eye(2)}, ("a", "b"), ("a", "b"), 9, "mean", {"linear_cka": "moments"})
    record = atlas.to_dict()
    del record["rows"]
    assert SimilarityAtlas.from_dict({**record, "pooling": pooling}).rows == rows
    with pytest.raises(ValueError, match="rows"):
        SimilarityAtlas.from_dict({**record, "pooling": ["mean"]})
