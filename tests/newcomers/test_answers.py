"""What misled newcomers, as they ran it: each test is a snippet, and the answer that it should give."""

from __future__ import annotations

import torch

import hf_stitch
from hf_stitch.analysis import Activations


# -- the best of many pairs of layers --------------------------------------------------------------------------------
def test_the_best_of_many_pairs_of_unrelated_layers_is_seldom_significant() -> None:
    """Nearly always some of 64 pairs of unrelated layers has p < 5% by itself; adjusted, as seldom as it should."""
    generator, trials = torch.Generator().manual_seed(0), 60
    alone, adjusted = 0, 0
    for seed in range(trials):
        sides = [
            Activations({f"{i}": torch.randn(20, 6, generator=generator) for i in range(8)}, range(20))
            for _ in range(2)
        ]
        atlas = hf_stitch.compare(*sides, permutations=99, seed=seed, progress=False)
        alone += atlas.tests["linear_cka"].unadjusted.min() <= 0.05
        adjusted += atlas.p_values().min() <= 0.05
    assert alone > 0.8 * trials and adjusted < 0.15 * trials
