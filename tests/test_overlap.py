"""Samples that a stitching layer was fitted to are recognised by their content."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import hf_stitch
from hf_stitch import Samples
from hf_stitch.data.overlap import FITTED, SIZE, ContentSketch
from hf_stitch.workflows import audit, evaluate, stitch, swap

from tiny_networks import LAYERS, network  # isort: skip


@pytest.mark.parametrize("n", [1, 40, SIZE, 3 * SIZE])
def test_shares_of_few_samples_are_exact_and_of_many_estimated(n: int) -> None:
    fitted = torch.randn(n, 2)
    sketch = ContentSketch.of(Samples.of(fitted))
    sketch = ContentSketch.from_dict(json.loads(json.dumps(sketch.to_dict())))
    assert len(json.dumps(sketch.to_dict())) <= 8300
    assert sketch.share(Samples.of(fitted.flip(0))) == 1
    assert sketch.share(Samples.of(torch.randn(500, 2))) == 0
    half = torch.cat([fitted, torch.randn(n, 2)])
    assert sketch.share(Samples.of(half)) == pytest.approx(0.5, abs=0 if n <= SIZE else 0.05)


def test_no_share_is_given_if_too_few_samples_can_be_compared() -> None:
    fitted = Samples.of(torch.randn(300 * SIZE, 1))
    assert ContentSketch.of(fitted).share(fitted.take(100)) is None


def test_a_swap_is_not_scored_on_its_own_anchors(halves: Any) -> None:
    train, test, _ = halves
    options = {"target_layer": LAYERS["cnn"], "encoder_layer": LAYERS["cnn"], "progress": False}
    with pytest.raises(ValueError, match="all 40 samples are anchors"):
        swap(network("cnn"), network("cnn", 1), train, data=train, **options)
    assert swap(network("cnn"), network("cnn", 1), train, data=test, **options).evaluation.fitted_share == 0


def test_ids_and_labels_do_not_identify_a_sample() -> None:
    sketch = ContentSketch.of(Samples.of(["a", "b"], label=[0, 1], id=["x", "y"]))
    assert sketch.share(Samples.of(["b", "c"], id=["x", "y"])) == 0.5
    assert sketch.share(Samples.of([("a", "b")])) == 0


@pytest.mark.parametrize("record", [{}, {"n": 1, "hashes": "!"}, {"n": 1, "hashes": "AAAA"}, {"n": "x", "hashes": ""}])
def test_damaged_records_are_named(record: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="invalid record of fitted samples"):
        ContentSketch.from_dict(record)


@pytest.fixture(scope="module")
def halves(images: Any) -> tuple[Any, Any, dict[str, Any]]:
    layers = {"source_layer": LAYERS["cnn"], "target_layer": LAYERS["vit"], "progress": False, "matcher": "ridge"}
    return images[:40], images[40:], layers


def test_scores_on_fitted_samples_are_named_as_such(halves: Any) -> None:
    train, test, layers = halves
    a, b = network("cnn"), network("vit", 1)
    with pytest.warns(UserWarning, match=r"was fitted to 100\.0% of these samples, so the scores are too high"):
        stitched = stitch(a, b, train, test_data=train, **layers)
    assert stitched.evaluation.fitted_share == 1
    assert "40 samples, 100% of them used for fitting" in str(stitched.evaluation)
    card = hf_stitch.artefacts.card.card(stitched.describe())
    assert "40 samples, 100% of them used for fitting" in card and "40 held-out samples" not in card
    with pytest.raises(ValueError, match=r"fitted to 100\.0% of these samples; pass held-out samples"):
        audit(stitched, train, progress=False)
    with pytest.warns(UserWarning, match=r"fitted to 50\.0% of these samples"):
        assert evaluate(stitched, [*train[:20], *test[:20]], progress=False).fitted_share == 0.5


def test_held_out_samples_are_named_as_such_also_after_loading(halves: Any, tmp_path: Any) -> None:
    train, test, layers = halves
    stitched = stitch(network("cnn"), network("vit", 1), train, test_data=test, **layers)
    assert stitched.evaluation.fitted_share == 0
    assert "40 held-out samples" in str(stitched.evaluation)
    stitched.save_pretrained(tmp_path)
    again = hf_stitch.StitchedModel.from_pretrained(tmp_path)
    assert again.config.recipe[FITTED] == stitched.config.recipe[FITTED]
    with pytest.warns(UserWarning, match="fitted to 100"):
        evaluate(again, train, target=network("vit", 1), progress=False)


def test_an_identity_is_fitted_to_nothing(halves: Any) -> None:
    train, _, layers = halves
    layers = layers | {"matcher": "identity", "target_layer": LAYERS["cnn"]}
    assert stitch(network("cnn"), network("cnn", 1), train, test_data=train, **layers).evaluation.fitted_share is None
