"""The matcher that needs no pairs: planted maps, refusals, networks, the name in hf-stitch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from embedding_unpaired_cases import CUT, clustered, networks
from hf_stitch_embeddings import Unsupervised
from hf_stitch_embeddings.unsupervised import match_by_similarity
from torch import Tensor

import hf_stitch
from hf_stitch.matchers import NoAlignmentError

ALONE = Unsupervised(clusters=(12,), starts=4, iterations=10)


def test_it_is_registered_by_name() -> None:
    assert hf_stitch.registries.matchers.get("unsupervised") is Unsupervised
    assert hf_stitch.registries.matchers.entry("unsupervised").origin == "plugin hf-stitch-embeddings 0.1.0"


def test_an_assignment_is_the_best_of_all() -> None:
    random = np.random.default_rng(0)
    a, b = (each + each.T for each in random.normal(size=(2, 6, 6)))
    sums = {
        p: sum(a[i, j] * b[p[i], p[j]] for i in range(6) for j in range(6)) for p in itertools.permutations(range(6))
    }
    places, value = match_by_similarity(torch.from_numpy(a), torch.from_numpy(b), 100, 0)
    assert value == pytest.approx(max(sums.values()))
    assert tuple(places.tolist()) == max(sums, key=lambda p: sums[p])


def test_a_planted_map_is_found_without_pairs() -> None:
    x, y, turn = clustered()
    stitch = ALONE.fit(x, y)
    mapped = stitch(x).detach()
    assert torch.cosine_similarity(mapped, x @ turn).mean() > 0.97
    assert stitch.fitted["cycle"] > 0.9 and stitch.fitted["overlap"] > 0.95
    assert stitch.fitted["clusters"] == 12


def unrelated(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Two spaces with nothing in common but, for some, their single features."""
    g = torch.Generator().manual_seed(seed)
    if kind == "independent Gaussians":
        return torch.randn(800, 16, generator=g), torch.randn(800, 16, generator=g)
    x, y, _ = clustered(seed=seed)
    if kind == "features shuffled one by one":
        return x, torch.stack([column[torch.randperm(len(y), generator=g)] for column in y.T], 1)
    return x, clustered(clusters=17, seed=seed + 1000)[1]


@pytest.mark.parametrize("seeds", [range(2), range(2, 10)], ids=["", "more"])
@pytest.mark.parametrize("kind", ["independent Gaussians", "features shuffled one by one", "other clusters"])
def test_unrelated_spaces_are_refused(kind: str, seeds: range) -> None:
    for seed in seeds:
        with pytest.raises(NoAlignmentError, match=r"cycle -?\d\.\d\d .*overlap \d\.\d\d"):
            ALONE.fit(*unrelated(kind, seed))


def test_further_rows_are_further_rows() -> None:
    x, y, _ = clustered()
    whole, parts = ALONE.fit(x, y), ALONE.fit(x[:500], y[:100], unpaired=(x[500:], y[100:]))
    assert torch.equal(whole.weight, parts.weight)


def test_rows_that_determine_nothing_are_refused() -> None:
    x, y, _ = clustered(400)
    with pytest.raises(ValueError, match="12 clusters require at least 48 rows of the target, got 40"):
        ALONE.fit(x, y[:40])
    with pytest.raises(ValueError, match="all 400 rows of the source are equal"):
        ALONE.fit(torch.ones_like(x), y)


@pytest.mark.parametrize(
    ("option", "value"), [("clusters", (10, 2)), ("clusters", ()), ("starts", 1), ("restarts", 0), ("iterations", 0)]
)
def test_options_out_of_range_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{option}(\[\d\])? must"):
        Unsupervised(**{option: value})


def test_a_refusal_reaches_the_user() -> None:
    a, b, x = networks()
    noise = torch.randn(400, 6), torch.randn(400, 6)
    matcher = Unsupervised(clusters=(8,), starts=2, iterations=3)
    with pytest.raises(NoAlignmentError, match=r"the map of positions .* could not be aligned"):
        hf_stitch.stitch(a, b, x[800:], matcher=matcher, unpaired=noise, **CUT)


def test_without_unpaired_samples_the_pairs_of_the_data_are_forgotten() -> None:
    a, b, x = networks()
    stitched = hf_stitch.stitch(a, b, x, matcher=ALONE, **CUT)
    assert stitched.stitch.body.fitted["cycle"] > 0.6 and "unpaired" not in stitched.config.recipe
