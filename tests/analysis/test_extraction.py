"""Activations are those of the network, also after they were saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_stitch.analysis import Activations, extract_activations

from tiny_networks import SIZE, WORDS, network  # isort: skip

QUIET: dict[str, Any] = {"batch_size": 8, "progress": False}
IMAGES, TEXTS = ("vit", "cnn"), ("bert", "llama")
POOLINGS = {"none": IMAGES + TEXTS, "mean": IMAGES + TEXTS, "cls": ("bert",), "last": ("llama",)}


def samples(family: str) -> Any:
    if family in IMAGES:
        return torch.randn(20, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(WORDS, size=2 + place % 9)) for place in range(20)]  # padded per batch


@pytest.mark.parametrize(("pooling", "family"), [(each, name) for each, names in POOLINGS.items() for name in names])
def test_activations_are_those_of_the_network_bit_for_bit(family: str, pooling: Any, tmp_path: Path) -> None:
    adapter, data = network(family), samples(family)
    found = extract_activations(adapter, data, pooling=pooling, **QUIET)
    assert found.layers == tuple(adapter.candidates)
    encoded = adapter.encode(adapter.preprocess(data[:8]), list(found.layers))
    for layer, values in found.values.items():
        representation = encoded[layer]
        if pooling != "none" or representation.layout == "bd":
            assert torch.equal(values[:8], representation.rows(pooling))
            continue
        expected = representation.positions()
        assert torch.equal(values[:8, : expected.shape[1]], expected) and not values[:8, expected.shape[1] :].any()
        assert found.grids.get(layer) == representation.grid
    assert (found.mask is None) == (pooling != "none" or family in IMAGES)
    found.save(tmp_path / "saved.safetensors")
    again = Activations.load(tmp_path / "saved.safetensors")
    assert again.fingerprint == found.fingerprint  # ids, pooling, mask, grids, names and bytes in their order


def test_a_layer_that_is_named_twice_counts_once_and_the_order_is_as_asked() -> None:
    adapter, data = network("vit"), samples("vit")
    names = list(adapter.candidates)[::-1]
    assert list(extract_activations(adapter, data, layers=[*names, names[0]], **QUIET).layers) == names


def test_the_error_for_a_cache_tells_how_to_keep_activations() -> None:
    with pytest.raises(TypeError, match=r"'cache'; keep activations with extract_activations\(…\)\.save"):
        extract_activations(network("vit"), samples("vit"), cache=True, **QUIET)  # type: ignore[call-arg]
