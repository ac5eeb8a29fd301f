"""An adapter of a third-party library, registered by a distribution, in the whole public API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_testing import check_adapter
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

import hf_stitch
from hf_stitch import registries
from hf_stitch.registry import PluginError

DIGITS = load_digits()
IMAGES = (DIGITS.data / 16).astype(np.float32)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the distribution on the path, as an installer would."""
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("third_library")))
    registries.adapters.__dict__.pop("_plugins", None)
    yield
    registries.adapters.__dict__.pop("_plugins", None)


@pytest.fixture(scope="module")
def classifiers() -> list[MLPClassifier]:
    fitted = []
    for seed in (0, 1):
        with pytest.warns(ConvergenceWarning):
            net = MLPClassifier((24, 20, 16), random_state=seed, max_iter=15)
            fitted.append(net.fit(IMAGES[:1200], DIGITS.target[:1200]))
    return fitted


def samples() -> hf_stitch.Samples:
    return hf_stitch.Samples.of(torch.from_numpy(IMAGES[1200:]), label=DIGITS.target[1200:])


def test_the_adapter_is_found_and_conforms(installed: None, classifiers: list[Any]) -> None:
    assert registries.adapters.entry("sklearn").origin == "plugin hf-stitch-sklearn 0.1.0"
    adapter = hf_stitch.load(classifiers[0])
    assert adapter.library == "sklearn" and adapter.layers == ("0", "1", "2")
    check_adapter(adapter, {"features": torch.from_numpy(IMAGES[:3])})
    logits = adapter.forward(torch.from_numpy(IMAGES[:50]))
    np.testing.assert_allclose(logits.softmax(1).detach(), classifiers[0].predict_proba(IMAGES[:50]), atol=1e-5)


def test_networks_are_compared_stitched_and_saved(installed: None, classifiers: list[Any], tmp_path: Path) -> None:
    a, b = map(hf_stitch.load, classifiers)
    atlas = hf_stitch.compare(a, b, samples(), progress=False)
    assert atlas["linear_cka"].shape == (3, 3)
    assert atlas.best_matches()["0"] == "0"
    stitched = hf_stitch.stitch(a, b, samples(), source_layer="1", target_layer="1", progress=False)
    assert stitched.evaluation["relative_accuracy"].value > 0.7
    stitched.save_pretrained(tmp_path / "model")
    stitched.stitcher.save_pretrained(tmp_path / "stitcher")
    rows = torch.from_numpy(IMAGES[:20])
    whole = hf_stitch.StitchedModel.from_pretrained(tmp_path / "model")
    assert torch.equal(whole(features=rows).logits, stitched(features=rows).logits)
    attached = hf_stitch.Stitcher.from_pretrained(tmp_path / "stitcher").attach(*classifiers)
    assert torch.equal(attached(features=rows).logits, stitched(features=rows).logits)


def test_networks_are_loaded_by_name(installed: None, classifiers: list[Any], tmp_path: Path) -> None:
    net = classifiers[0]
    arrays = {f"coefs_{i}": weight for i, weight in enumerate(net.coefs_)}
    arrays |= {f"intercepts_{i}": bias for i, bias in enumerate(net.intercepts_)}
    np.savez(tmp_path / "net.npz", activation=net.activation, **arrays)
    named, live = hf_stitch.load(f"sklearn:{tmp_path / 'net.npz'}"), hf_stitch.load(net)
    assert named.pinned.weights_hash == live.pinned.weights_hash
    assert str(named.reference) == f"sklearn:{tmp_path / 'net.npz'}"


def test_without_the_plugin_the_error_names_the_distribution(
    installed: None, classifiers: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = map(hf_stitch.load, classifiers)
    hf_stitch.stitch(a, b, samples(), source_layer="1", target_layer="1", progress=False).save_pretrained(tmp_path)
    monkeypatch.undo()
    registries.adapters.__dict__.pop("_plugins", None)
    with pytest.raises(
        TypeError,
        match=r"one of a library that has an adapter: hf_stitch, .*, timm, torch, transformers.*\), got sklearn\.MLP",
    ):
        hf_stitch.load(classifiers[0])
    with pytest.raises(PluginError, match=r"sklearn.*hf-stitch-sklearn 0\.1\.0.*pip install hf-stitch-sklearn"):
        hf_stitch.StitchedModel.from_pretrained(tmp_path)
