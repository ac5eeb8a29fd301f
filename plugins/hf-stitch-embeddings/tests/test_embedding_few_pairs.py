"""A matcher that takes rows without partners: planted maps, independent computations, refusals, the public API."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from embedding_unpaired_cases import CUT, networks
from hf_stitch_embeddings import SeededRefinement
from hf_stitch_embeddings.few_pairs import mutual_neighbours, refine, span
from torch import Tensor
from torch.nn import ReLU

import hf_stitch
from hf_stitch.matchers import NoAlignmentError
from hf_stitch.matchers.alignment import Procrustes

SEEDED = SeededRefinement(iterations=10)


def planted(n: int = 1500, width: int = 32, noise: float = 0.3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of uneven variance, and the same after an orthogonal map with noise, both with means away from 0."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=g) * torch.linspace(2, 0.5, width)
    turn = torch.linalg.qr(torch.randn(width, width, generator=g)).Q
    return x + 3, 2 * (x + noise * torch.randn(n, width, generator=g)) @ turn - 4


def top1(stitch: Any, x: Tensor, y: Tensor) -> float:
    """Share of rows whose mapped vector is nearest to the partner, by cosine about the mean."""
    with torch.no_grad():
        mapped = stitch(x)
    mapped, y = (torch.nn.functional.normalize(rows - y.mean(0), dim=1) for rows in (mapped, y))
    return ((mapped @ y.T).argmax(1) == torch.arange(len(x))).double().mean().item()


@pytest.mark.parametrize("seeds", [10, 30, 100])
def test_a_planted_map_is_found_from_few_seeds(seeds: int) -> None:
    x, y = planted()
    fitted, rest = slice(0, seeds), slice(100, 800)
    unpaired = x[rest], y[rest].flip(0)
    stitch = SeededRefinement().fit(x[fitted], y[fitted], unpaired=unpaired)
    moments = hf_stitch.Moments(32, 32).update(x[fitted], y[fitted])
    before, after = (top1(each, x[-300:], y[-300:]) for each in (Procrustes(scale=True).fit(moments), stitch))
    assert after > 0.9 and after >= before
    assert seeds > 10 or after > before + 0.2
    assert stitch.fitted["seeds"] == seeds and stitch.fitted["n"] == seeds + stitch.fitted["mutual"]
    assert stitch.fitted["scale"] == pytest.approx(2, rel=0.1) and stitch.fitted["seed_rank"] < 0.35


@pytest.mark.parametrize("widths", [(32, 32), (24, 32), (32, 24)])
def test_lengths_are_those_of_the_target_without_partners(widths: tuple[int, int]) -> None:
    x, y = planted(4000)
    if widths[0] > widths[1]:  # the map projects: the target has the directions of greatest variance alone
        y = y[:, : widths[1]]
    x = x[:, : widths[0]]
    stitch = SeededRefinement().fit(x[:100], y[:100], unpaired=(x[100:2000], y[2000:]))
    mapped = stitch(x).detach()
    centred = mapped - mapped.mean(0), y - y.mean(0)
    image = torch.linalg.qr(stitch.weight.detach()).Q  # of the map, a part of the target if that is wider
    spread = [(rows @ image).square().sum().sqrt().item() for rows in centred]
    assert spread[0] == pytest.approx(spread[1], rel=0.05)
    torch.testing.assert_close(mapped.mean(0), y.mean(0), atol=0.4, rtol=0)


def test_pairs_that_are_none_are_refused() -> None:
    x, y = planted()
    refused = 0
    for seed in range(10):
        wrong = torch.randperm(100, generator=torch.Generator().manual_seed(seed))
        try:
            SEEDED.fit(x[:100], y[wrong], unpaired=(x[100:800], y[800:]))
        except NoAlignmentError as error:
            assert "not found better than chance" in str(error) and "chance: 50%" in str(error)
            refused += 1
    assert refused >= 9  # a test at two standard errors


def test_mutual_neighbours_are_those_of_the_formula() -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(40, 5)), random.normal(size=(30, 5))
    cosines = np.array([[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in y] for a in x])
    of_x, of_y = np.sort(cosines, 1)[:, -7:].mean(1), np.sort(cosines, 0)[-7:].mean(0)
    scaled = np.array([[2 * cosines[i, j] - of_x[i] - of_y[j] for j in range(30)] for i in range(40)])
    expected = [(i, j) for i, j in enumerate(scaled.argmax(1)) if scaled[:, j].argmax() == i]
    found = mutual_neighbours(torch.from_numpy(x), torch.from_numpy(y), 7)
    assert list(zip(*(each.tolist() for each in found), strict=True)) == expected and len(expected) > 5


def test_with_fewer_rows_than_neighbours_all_count() -> None:
    x, y = torch.eye(3), torch.eye(3)
    assert [each.tolist() for each in mutual_neighbours(x, y, 10)] == [[0, 1, 2], [0, 1, 2]]


def test_few_pairs_span_few_directions() -> None:
    x, y = planted()
    few = x[:8] - x[:8].mean(0), y[:8] - y[:8].mean(0)
    left, right = span(*few)
    assert left.shape == right.shape == (32, 7)
    torch.testing.assert_close(left @ left.T @ few[0].T, few[0].T, atol=1e-4, rtol=1e-4)


def test_refinement_ends_when_pairs_are_stable() -> None:
    x, y = (rows - rows.mean(0) for rows in planted(noise=0.1))
    found = refine((x[:50], y[:50]), x[50:], y[50:], neighbours=10, iterations=10, seed=0)
    assert found.stable and found.rounds < 10 and torch.equal(found.x, found.y)
    once = refine((x[:50], y[:50]), x[50:], y[50:], neighbours=10, iterations=1, seed=0)
    assert not once.stable and once.rounds == 1


def test_rows_that_determine_nothing_are_refused() -> None:
    x, y = planted(400)
    rest = x[100:], y[100:]
    with pytest.raises(ValueError, match="at least 5 rows, got 4; pass more pairs, or use 'unsupervised'"):
        SEEDED.fit(x[:4], y[:4], unpaired=rest)
    with pytest.raises(ValueError, match="requires unpaired rows in addition to the 20 pairs"):
        SEEDED.fit(x[:20], y[:20])


@pytest.mark.parametrize("option", ["neighbours", "rows"])
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must"):
        SeededRefinement(**{option: 0})


def test_a_refusal_and_what_is_trained_further_reach_the_user() -> None:
    from hf_stitch.training import TaskLoss

    a, b, x = networks()
    wrong = {"paired_data": x[800:].flip(0), "unpaired": (x[:400], x[400:800])}
    with pytest.raises(NoAlignmentError, match=r"the map of positions .* not found better than chance"):
        hf_stitch.stitch(a, b, x[800:], matcher=SEEDED, **wrong, **CUT)
    trained = TaskLoss(initial=SEEDED, max_steps=2)
    stitched = hf_stitch.stitch(a, b, x[800:], test_size=0.5, matcher=trained, unpaired=(x[:400], x[400:800]), **CUT)
    assert stitched.config.recipe["fitted_samples"]["n"] == 850
    assert hf_stitch.evaluate(stitched, x[:50], target=b, progress=False).fitted_share == 1


def test_positions_are_rows_too() -> None:
    torch.manual_seed(0)
    nets = [torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), ReLU(), torch.nn.Conv2d(8, 4, 3), ReLU()) for _ in "ab"]
    nets[1].load_state_dict(nets[0].state_dict())
    a, b = (hf_stitch.load(net.eval(), example_inputs=torch.randn(2, 3, 8, 8)) for net in nets)
    x = torch.randn(90, 3, 8, 8)
    stitched = hf_stitch.stitch(
        a, b, x[:30], source_layer="1", target_layer="1", task=None, matcher=SEEDED, unpaired=(x[30:60], x[60:]),
        progress=False,
    )  # fmt: skip
    assert stitched.stitch.body.fitted["seeds"] == 24 * 36
    assert torch.cosine_similarity(stitched(input=x), nets[1](x), dim=1).mean() > 0.9


def test_unpaired_samples_without_use_are_refused() -> None:
    a, b, x = networks()
    with pytest.raises(ValueError, match="'lstsq' does not support unpaired"):
        hf_stitch.stitch(a, b, x, unpaired=(x, x), **CUT)
    with pytest.raises(ValueError, match="'seeded_refinement' requires samples without partners; pass unpaired="):
        hf_stitch.stitch(a, b, x, matcher="seeded_refinement", **CUT)
    with pytest.raises(ValueError, match=r"unpaired must be a tuple or None, got torch.Tensor"):
        hf_stitch.stitch(a, b, x, matcher="seeded_refinement", unpaired=x, **CUT)
    with pytest.raises(ValueError, match="unpaired samples of the source must be at least 2, got 1"):
        hf_stitch.stitch(a, b, x, matcher="seeded_refinement", unpaired=(x[:1], x), **CUT)
    with pytest.raises(ValueError, match=r"'seeded_refinement.*requires rows, but a grid stores only moments"):
        hf_stitch.stitch_grid(
            a, b, hf_stitch.Samples.of(x, label=[0] * 900), matchers=[SEEDED], task="image-classification",
            progress=False,
        )  # fmt: skip
