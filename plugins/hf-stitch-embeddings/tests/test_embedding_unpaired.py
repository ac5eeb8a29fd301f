"""What the matchers that take rows without partners have in common."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from embedding_unpaired_cases import CUT, clustered, networks
from hf_stitch_embeddings import SeededRefinement, Unsupervised

import hf_stitch
from hf_stitch.matchers.base import RowsMatcher

MATCHERS = {
    "seeded_refinement": SeededRefinement(iterations=10),
    "unsupervised": Unsupervised(clusters=(12,), starts=4, iterations=10),
}
PAIRS_COUNT = {"seeded_refinement": 50, "unsupervised": 0}
"""Pairs of samples that are fitted to."""
BOTH = pytest.mark.parametrize("matcher", MATCHERS.values(), ids=MATCHERS)


@BOTH
def test_a_fit_leaves_the_random_state(matcher: RowsMatcher) -> None:
    x, _, turn = clustered()
    y, state = x @ turn, torch.get_rng_state()
    matcher.fit(x[:100], y[:100], unpaired=(x[100:], y[100:].flip(0)))
    assert torch.equal(state, torch.get_rng_state())


@BOTH
def test_unpaired_rows_that_determine_nothing_are_refused(matcher: RowsMatcher) -> None:
    x, y, _ = clustered(400)
    with pytest.raises(ValueError, match=r"unpaired rows of the target must have shape \(n, 16\)"):
        matcher.fit(x[:20], y[:20], unpaired=(x[20:], y[20:, :5]))
    with pytest.raises(ValueError, match="unpaired rows of the source contain NaN"):
        matcher.fit(x[:20], y[:20], unpaired=(x[20:] * float("nan"), y[20:]))
    with pytest.raises(TypeError, match="must be floating point"):
        matcher.fit(x[:20], y[:20], unpaired=(x[20:].long(), y[20:]))


@BOTH
def test_networks_are_stitched_and_saved_with_it(matcher: RowsMatcher, tmp_path: Path) -> None:
    a, b, x = networks()
    unpaired = x[:400], x[400:800]
    stitched = hf_stitch.stitch(a, b, x[800:], test_size=0.5, matcher=matcher, unpaired=unpaired, **CUT)
    fitted = stitched.stitch.body.fitted
    assert fitted["n"] > 100 and stitched.stitch.body_mean.abs().sum() > 0
    assert (stitched(input=x).logits.argmax(1) == b.model(x).argmax(1)).double().mean() > 0.8
    assert stitched.config.recipe["matcher"]["name"] == matcher.name
    assert stitched.config.recipe["unpaired"] == [hf_stitch.Samples.of(side).fingerprint for side in unpaired]
    assert stitched.config.recipe["fitted_samples"]["n"] == 800 + PAIRS_COUNT[matcher.name]
    assert hf_stitch.evaluate(stitched, x[:50], target=b, progress=False).fitted_share == 1
    plan = hf_stitch.plan(hf_stitch.stitch, a, b, x[800:], test_size=0.5, matcher=matcher, unpaired=unpaired, **CUT)
    assert plan.memory["rows without partners"] == 400 * 2 * 16 * 4
    assert plan.stages["reading samples without partners"] > 0
    stitched.stitcher.save_pretrained(tmp_path)
    again = hf_stitch.Stitcher.from_pretrained(tmp_path).attach(a, b)
    assert torch.equal(again(input=x[:9]).logits, stitched(input=x[:9]).logits)
