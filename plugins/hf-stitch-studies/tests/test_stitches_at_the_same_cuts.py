"""Stitching layers at the same cuts: interpolation, pruning and reduced rank."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_studies import (
    Curves,
    ModeConnectivity,
    interpolate,
    mode_connectivity,
    rank_curve,
    reduced_ranks,
    score_curves,
    sparsify,
    sparsity_curve,
    zero_share,
)
from rich.console import Console

import hf_stitch
from hf_stitch.artefacts.joining import join
from hf_stitch.data import PairedSamples
from hf_stitch.pairs import CollectedPair, Pair
from hf_stitch.registry import registries
from hf_stitch.representation import RepresentationSpec
from hf_stitch.stitches import LinearStitch, LowRankStitch, MaskedStitch, StitchingLayer

QUICK = {"resamples": 100, "progress": False}
GRID, TOKENS = RepresentationSpec("bchw", 6, (2, 2)), RepresentationSpec("bnd", 4, (2, 2), prefix_tokens=1)


def layer(seed: int, body: Any = LinearStitch, **options: Any) -> StitchingLayer:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return StitchingLayer(GRID, TOKENS, "none", body(6, 4, **options), LinearStitch(6, 4))


def text_of(shown: Any) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(shown)
    return console.export_text()


# -- connectivity ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_maps_are_interpolated_as_full_matrices(weight: float) -> None:
    first, second = layer(0, LowRankStitch, rank=2), layer(1, bias=False)
    x = hf_stitch.Representation(torch.randn(5, 6, 2, 2), "bchw")
    got = interpolate(first, second, weight)(x).values
    torch.testing.assert_close(got, weight * first(x).values + (1 - weight) * second(x).values)


def test_stitching_layers_at_different_cuts_are_not_interpolated() -> None:
    other = StitchingLayer(GRID, RepresentationSpec("bchw", 4, (2, 2)), "none", LinearStitch(6, 4))
    with pytest.raises(ValueError, match=r"the same target, got bnd 4 2x2 \+1 and bchw 4 2x2"):
        interpolate(layer(0), other, 0.5)


def test_paths_are_scored_and_weak_stitching_layers_are_left_out(place: Any) -> None:
    own, ranks = place.stitched.stitch, reduced_ranks(place.stitched, place.train, [1, 4], progress=False)
    stitches = {"full": own, "four": ranks[4], "one": ranks[1], "also": own}
    found = mode_connectivity(place.stitched, stitches, place.test, weights=[0.5], **QUICK)
    assert list(found.left_out) == ["one"]
    assert list(found.paths) == [("full", "four"), ("full", "also"), ("four", "also")]
    assert list(found.paths["full", "four"]) == [0.0, 0.5, 1.0]
    middle = join(place.source, "0", interpolate(own, ranks[4], 0.5), place.target, "0", task=place.target.task)
    expected = hf_stitch.evaluate(middle, place.test, **QUICK)["relative_accuracy"]
    assert found.paths["full", "four"][0.5] == expected
    assert (
        found.paths["full", "four"][1.0] == hf_stitch.evaluate(place.stitched, place.test, **QUICK)["relative_accuracy"]
    )
    barrier = found.barriers["full", "also"]
    assert (barrier.value, barrier.low, barrier.high) == (0.0, 0.0, 0.0)

    assert ModeConnectivity.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found
    assert len(found.to_pandas()) == 9
    assert "left out, below 0.8: one (0." in text_of(found)
    assert len(found.plot().axes[0].lines) == 3


def test_a_barrier_is_the_greatest_drop_below_the_line_between_the_ends(place: Any) -> None:
    itself = join(place.target, "0", place.stitched.stitch.identity(), place.target, "0", task=place.target.task)
    identity = itself.stitch.with_maps(LinearStitch.of(weight=torch.eye(8), bias=torch.zeros(8)), None)
    found = mode_connectivity(
        itself,
        {"a": identity, "b": place.stitched.stitch},
        place.test,
        weights=[0.5],
        min_relative_accuracy=0.0,
        **QUICK,
    )
    path, barrier = found.paths["a", "b"], found.barriers["a", "b"]
    line = (path[0.0].value + path[1.0].value) / 2
    assert barrier.value == pytest.approx(max(0.0, line - path[0.5].value))


def test_connectivity_rejects_bad_input(place: Any) -> None:
    own = place.stitched.stitch
    with pytest.raises(ValueError, match=r"weights must be in \[0, 1\], got 1\.5"):
        mode_connectivity(place.stitched, {"a": own}, place.test, weights=[1.5])
    with pytest.raises(ValueError, match=r"fewer than two stitching layers reach a relative accuracy of 0\.8: a 0\.9"):
        mode_connectivity(place.stitched, {"a": own}, place.test, **QUICK)
    with pytest.raises(ValueError, match=r"stitch 'b' must map .*, got bchw 6 2x2 to bnd 4"):
        mode_connectivity(place.stitched, {"a": own, "b": layer(0)}, place.test, **QUICK)
    unlabelled = torch.randn(4, 3, 8, 8)
    with pytest.raises(ValueError, match="samples with labels"):
        mode_connectivity(place.stitched, {"a": own, "b": own}, unlabelled, **QUICK)


# -- sparsity --------------------------------------------------------------------------------------------------------


def test_the_smallest_entries_become_zero() -> None:
    weight = torch.tensor([[0.5, -1e-5, 2.0], [0.0, -3.0, 1e-4]])
    full = StitchingLayer(
        RepresentationSpec("bd", 3),
        RepresentationSpec("bd", 2),
        "none",
        LinearStitch.of(weight=weight, bias=torch.zeros(2)),
    )
    assert zero_share(full) == pytest.approx(1 / 6)
    thin = sparsify(full)
    assert isinstance(thin.body, MaskedStitch)
    assert thin.body.mask.tolist() == [[True, False, True], [False, True, True]]
    assert zero_share(thin) == pytest.approx(2 / 6)
    assert sparsify(full, sparsity=4 / 6).body.matrix().tolist() == [[0, 0, 2.0], [0, -3.0, 0]]
    assert zero_share(sparsify(full, sparsity=1.0)) == 1.0
    assert torch.equal(sparsify(full, sparsity=0.0).body.matrix(), weight)
    assert torch.equal(full.body.weight, weight)


def test_sparsity_is_exact_with_ties_and_for_each_map() -> None:
    equal = layer(0)
    with torch.no_grad():
        equal.body.weight.fill_(1.0)
    thin = sparsify(equal, sparsity=0.5)
    assert zero_share(thin) == 0.5
    assert (thin.prefix.matrix() == 0).sum() == 12
    assert torch.equal(thin.body.bias, equal.body.bias)


def test_a_sparse_stitching_layer_is_saved_with_its_model(place: Any, tmp_path: Any) -> None:
    thin = join(place.source, "0", sparsify(place.stitched.stitch, sparsity=0.5), place.target, "0", task=None)
    thin.stitcher.save_pretrained(tmp_path)
    again = hf_stitch.Stitcher.from_pretrained(tmp_path)
    assert zero_share(again.stitch) == 0.5
    x = torch.randn(3, 3, 8, 8)
    assert torch.equal(again.attach(place.source, place.target)(input=x), thin(input=x))


def test_the_sparsity_curve_starts_with_the_full_stitching_layer(place: Any) -> None:
    found = sparsity_curve(place.stitched, place.test, [0.9, 0.0, 0.5], **QUICK)
    assert list(found["stitched"]) == [0.0, 0.5, 0.9]
    assert found["stitched"][0.0] == hf_stitch.evaluate(place.stitched, place.test, **QUICK)["relative_accuracy"]
    assert found["stitched"][0.9].value < found["stitched"][0.0].value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1e-4, "sparsity": 0.5}, "got both"),
        ({"threshold": -1.0}, "threshold must be >= 0"),
        ({"threshold": float("nan")}, "threshold must be >= 0"),
        ({"sparsity": 1.1}, r"sparsity must be in \[0, 1\], got 1\.1"),
    ],
)
def test_pruning_rejects_bad_input(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparsify(layer(0), **options)


# -- rank ------------------------------------------------------------------------------------------------------------


def test_one_pass_matches_a_separate_pass_for_each_rank(place: Any) -> None:
    ranks = reduced_ranks(place.stitched, place.train, progress=False)
    assert list(ranks) == [1, 2, 4, 8]
    collected = CollectedPair(Pair(place.source, place.target).at([("0", "0")]), PairedSamples.of(place.train))
    for rank, found in ranks.items():
        alone = registries.matchers.build("low_rank", rank=rank).match(collected).only
        torch.testing.assert_close(found.body.matrix(), alone.body.matrix())
    torch.testing.assert_close(ranks[8].body.matrix(), place.stitched.stitch.body.weight, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="ranks must be from 1 to 8, the smaller width of the stitch, got 9"):
        reduced_ranks(place.stitched, place.train, [9])


def test_curves_over_the_same_axis_and_samples_join(place: Any) -> None:
    ranks = reduced_ranks(place.stitched, place.train, [1, 8], progress=False)
    direct = rank_curve(place.stitched, place.test, {"direct": ranks}, **QUICK)
    trained = rank_curve(place.stitched, place.test, {"trained": {8: ranks[8]}}, **QUICK)
    assert direct["direct"][1].value < direct["direct"][8].value
    both = direct.join(trained)
    assert list(both.scores) == ["direct", "trained"]
    assert both["trained"][8] == both["direct"][8]
    assert Curves.from_dict(json.loads(json.dumps(both.to_dict(), allow_nan=False))) == both
    assert list(both.to_pandas().columns) == ["curve", "rank", "value", "low", "high"]
    assert str(both["direct"][1]) in text_of(both)
    assert "–" in text_of(both)
    assert [line.get_label() for line in both.plot().axes[0].lines] == ["direct", "trained"]
    with pytest.raises(ValueError, match="different names of curves"):
        both.join(trained)
    with pytest.raises(ValueError, match="the same axis, got rank and sparsity"):
        direct.join(sparsity_curve(place.stitched, place.test, [0.5], **QUICK))
    fewer = rank_curve(place.stitched, place.test.take(50), {"few": {8: ranks[8]}}, **QUICK)
    with pytest.raises(ValueError, match="the same data, got sha256"):
        direct.join(fewer)


def test_stitching_layers_scored_together_match_separate_evaluations(place: Any) -> None:
    ranks = reduced_ranks(place.stitched, place.train, [2], progress=False)
    together = score_curves(
        place.stitched,
        place.test,
        "rank",
        {"a": {2: ranks[2]}, "b": {8: place.stitched.stitch}},
        batch_size=33,
        **QUICK,
    )
    for name, one in (("a", ranks[2]), ("b", place.stitched.stitch)):
        model = join(place.source, "0", one, place.target, "0", task=place.target.task)
        expected = hf_stitch.evaluate(model, place.test, **QUICK)["relative_accuracy"]
        [score] = together[name].values()
        np.testing.assert_allclose([score.value, score.low], [expected.value, expected.low], atol=0.006)
    with pytest.raises(ValueError, match="each family must contain a stitching layer"):
        score_curves(place.stitched, place.test, "rank", {"a": {}})
