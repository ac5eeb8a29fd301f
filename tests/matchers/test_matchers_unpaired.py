"""Matchers that take rows without partners: planted maps, independent computations, refusals, the public API."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_testing import check_matcher
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential

import hf_stitch
from hf_stitch.matchers import NoAlignmentError, Procrustes, SeededRefinement, UnpairedMatcher, Unsupervised
from hf_stitch.matchers._mutual import mutual_neighbours, refined, span
from hf_stitch.matchers.unsupervised import assigned

SEEDED, ALONE = SeededRefinement(iterations=10), Unsupervised(clusters=(8, 12), starts=4, iterations=10)
MATCHERS: list[UnpairedMatcher] = [SEEDED, ALONE]
CHECKED: list[UnpairedMatcher] = [SEEDED, Unsupervised(clusters=(12,), starts=4, restarts=100, iterations=10)]


def planted(n: int = 1500, width: int = 32, noise: float = 0.3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of uneven variance, and the same after an orthogonal map with noise, both with means away from 0."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=g) * torch.linspace(2, 0.5, width)
    turn = torch.linalg.qr(torch.randn(width, width, generator=g)).Q
    return x + 3, 2 * (x + noise * torch.randn(n, width, generator=g)) @ turn - 4


def clustered(n: int = 800, width: int = 16, clusters: int = 12, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in clusters, other rows of the same clusters after an orthogonal map, and the map."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(clusters, width, generator=g)
    x, y = (
        centres[torch.randint(clusters, (n,), generator=g)] + 0.2 * torch.randn(n, width, generator=g) for _ in "xy"
    )
    turn = torch.linalg.qr(torch.randn(width, width, generator=g)).Q
    return x, y @ turn, turn


def top1(stitch: Any, x: Tensor, y: Tensor) -> float:
    """Share of rows whose mapped vector is nearest to the partner, by cosine about the mean."""
    with torch.no_grad():
        mapped = stitch(x)
    mapped, y = (torch.nn.functional.normalize(rows - y.mean(0), dim=1) for rows in (mapped, y))
    return ((mapped @ y.T).argmax(1) == torch.arange(len(x))).double().mean().item()


@pytest.mark.parametrize("check", [part for matcher in CHECKED for part in check_matcher.parts(matcher)], ids=str)
def test_conforms(check: Callable[[], None]) -> None:
    check()


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
            assert "wrong or too few" in str(error) and "by chance it is 50%" in str(error)
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
    found = refined((x[:50], y[:50]), x[50:], y[50:], neighbours=10, iterations=10, seed=0)
    assert found.stable and found.rounds < 10 and torch.equal(found.x, found.y)
    once = refined((x[:50], y[:50]), x[50:], y[50:], neighbours=10, iterations=1, seed=0)
    assert not once.stable and once.rounds == 1


def test_an_assignment_is_the_best_of_all() -> None:
    random = np.random.default_rng(0)
    a, b = (each + each.T for each in random.normal(size=(2, 6, 6)))
    sums = {
        p: sum(a[i, j] * b[p[i], p[j]] for i in range(6) for j in range(6)) for p in itertools.permutations(range(6))
    }
    places, value = assigned(torch.from_numpy(a), torch.from_numpy(b), 100, 0)
    assert value == pytest.approx(max(sums.values()))
    assert tuple(places.tolist()) == max(sums, key=lambda p: sums[p])


def test_a_planted_map_is_found_without_pairs() -> None:
    x, y, turn = clustered()
    stitch = ALONE.fit(x, y)
    mapped = stitch(x).detach()
    assert torch.cosine_similarity(mapped, x @ turn).mean() > 0.97
    assert stitch.fitted["cycle"] > 0.9 and stitch.fitted["overlap"] > 0.95
    assert stitch.fitted["clusters"] in (8, 12)


def unrelated(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Two spaces with nothing in common but, for some, their single features."""
    g = torch.Generator().manual_seed(seed)
    if kind == "independent Gaussians":
        return torch.randn(800, 16, generator=g), torch.randn(800, 16, generator=g)
    x, y, _ = clustered(seed=seed)
    if kind == "features shuffled one by one":
        return x, torch.stack([column[torch.randperm(len(y), generator=g)] for column in y.T], 1)
    return x, clustered(clusters=17, seed=seed + 1000)[1]


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 10), marks=pytest.mark.slow)], ids=["", "more"])
@pytest.mark.parametrize("kind", ["independent Gaussians", "features shuffled one by one", "other clusters"])
def test_unrelated_spaces_are_refused(kind: str, seeds: range) -> None:
    for seed in seeds:
        with pytest.raises(NoAlignmentError, match=r"cycle -?\d\.\d\d .*overlap \d\.\d\d"):
            ALONE.fit(*unrelated(kind, seed))


@pytest.mark.parametrize("matcher", MATCHERS, ids=lambda matcher: matcher.name)
def test_a_fit_leaves_the_random_state(matcher: UnpairedMatcher) -> None:
    x, y, _ = clustered()
    pairs = (x[:20], x[:20]) if matcher.least_pairs else (x[:0], y[:0])
    unpaired = (x[20:], x[20:].flip(0)) if matcher.least_pairs else (x, y)
    state = torch.get_rng_state()
    matcher.fit(*pairs, unpaired=unpaired)
    assert torch.equal(state, torch.get_rng_state())


def test_further_rows_are_further_rows() -> None:
    x, y, _ = clustered()
    whole, parts = ALONE.fit(x, y), ALONE.fit(x[:500], y[:100], unpaired=(x[500:], y[100:]))
    assert torch.equal(whole.weight, parts.weight)


def test_rows_that_determine_nothing_are_refused() -> None:
    x, y = planted(400)
    rest = x[100:], y[100:]
    with pytest.raises(ValueError, match="at least 5 rows, got 4; give more pairs, or use 'unsupervised'"):
        SEEDED.fit(x[:4], y[:4], unpaired=rest)
    with pytest.raises(ValueError, match="needs rows without partners beside the 20 pairs"):
        SEEDED.fit(x[:20], y[:20])
    for matcher in MATCHERS:
        with pytest.raises(ValueError, match=r"unpaired rows of the target must have shape \(n, 32\)"):
            matcher.fit(x[:20], y[:20], unpaired=(x[20:], y[20:, :5]))
        with pytest.raises(ValueError, match="unpaired rows of the source contain NaN"):
            matcher.fit(x[:20], y[:20], unpaired=(x[20:] * float("nan"), y[20:]))
        with pytest.raises(TypeError, match="must be floating point"):
            matcher.fit(x[:20], y[:20], unpaired=(x[20:].long(), y[20:]))
    with pytest.raises(ValueError, match="12 clusters of both halves of the target need at least 48 rows, got 40"):
        ALONE.fit(x, y[:40])
    with pytest.raises(ValueError, match="all 400 rows of the source are equal"):
        ALONE.fit(torch.ones_like(x), y)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SeededRefinement, {"neighbours": 0}),
        (SeededRefinement, {"rows": 0}),
        (Unsupervised, {"clusters": (10, 2)}),
        (Unsupervised, {"clusters": ()}),
        (Unsupervised, {"starts": 1}),
        (Unsupervised, {"restarts": 0}),
        (Unsupervised, {"iterations": 0}),
    ],
)
def test_options_out_of_range_are_refused(kind: type[UnpairedMatcher], options: dict[str, Any]) -> None:
    (option,) = options
    with pytest.raises(ValueError, match=rf"{option}(\[\d\])? must"):
        kind(**options)


# -- networks ----------------------------------------------------------------------------------------------------------


def networks() -> tuple[Any, Any, Tensor]:
    """Two networks whose hidden units are those of each other in another order, and points in clusters."""
    torch.manual_seed(0)
    nets = [Sequential(Linear(6, 16), ReLU(), Linear(16, 3)).eval() for _ in "ab"]
    order = torch.randperm(16)
    with torch.no_grad():
        nets[1][0].weight.copy_(nets[0][0].weight[order])
        nets[1][0].bias.copy_(nets[0][0].bias[order])
        nets[1][2].weight.copy_(nets[0][2].weight[:, order])
        nets[1][2].bias.copy_(nets[0][2].bias)
    a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 6)) for net in nets)
    return a, b, clustered(900, 6)[0] * 2


CUT: dict[str, Any] = {"source_layer": "1", "target_layer": "1", "task": "image-classification", "progress": False}


@pytest.mark.parametrize("matcher", MATCHERS, ids=lambda matcher: matcher.name)
def test_networks_are_stitched_and_saved_with_it(matcher: UnpairedMatcher, tmp_path: Any) -> None:
    a, b, x = networks()
    unpaired = x[:400], x[400:800]
    stitched = hf_stitch.stitch(a, b, x[800:], test_size=0.5, matcher=matcher, unpaired=unpaired, **CUT)
    fitted = stitched.stitch.body.fitted
    assert fitted["n"] > 100 and stitched.stitch.body_mean.abs().sum() > 0
    assert (stitched(input=x).logits.argmax(1) == b.model(x).argmax(1)).double().mean() > 0.8
    assert stitched.config.recipe["matcher"]["name"] == matcher.name
    assert stitched.config.recipe["unpaired"] == [hf_stitch.Samples.of(side).fingerprint for side in unpaired]
    sketch = stitched.config.recipe["fitted_samples"]
    assert sketch["n"] == 800 + (50 if matcher.least_pairs else 0)
    assert hf_stitch.evaluate(stitched, x[:50], target=b, progress=False).fitted_share == 1
    plan = hf_stitch.plan(hf_stitch.stitch, a, b, x[800:], test_size=0.5, matcher=matcher, unpaired=unpaired, **CUT)
    assert plan.memory["rows without partners"] == 400 * 2 * 16 * 4
    assert plan.stages["reading samples without partners"] > 0
    stitched.stitcher.save_pretrained(tmp_path)
    again = hf_stitch.Stitcher.from_pretrained(tmp_path).attach(a, b)
    assert torch.equal(again(input=x[:9]).logits, stitched(input=x[:9]).logits)


def test_a_refusal_and_what_is_trained_further_reach_the_user() -> None:
    from hf_stitch.training import TaskLoss

    a, b, x = networks()
    noise = torch.randn(400, 6), torch.randn(400, 6)
    matcher = Unsupervised(clusters=(8,), starts=2, iterations=3)
    with pytest.raises(NoAlignmentError, match=r"the map of positions .* not aligned"):
        hf_stitch.stitch(a, b, x[800:], matcher=matcher, unpaired=noise, **CUT)
    trained = TaskLoss(initial=SEEDED, max_steps=2)
    stitched = hf_stitch.stitch(a, b, x[800:], test_size=0.5, matcher=trained, unpaired=(x[:400], x[400:800]), **CUT)
    assert stitched.config.recipe["fitted_samples"]["n"] == 850
    assert hf_stitch.evaluate(stitched, x[:50], target=b, progress=False).fitted_share == 1


def test_without_unpaired_samples_the_pairs_of_the_data_are_forgotten() -> None:
    a, b, x = networks()
    stitched = hf_stitch.stitch(a, b, x, matcher=ALONE, **CUT)
    assert stitched.stitch.body.fitted["cycle"] > 0.6 and "unpaired" not in stitched.config.recipe


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
    with pytest.raises(ValueError, match="'lstsq' is fitted to pairs alone: leave out unpaired"):
        hf_stitch.stitch(a, b, x, unpaired=(x, x), **CUT)
    with pytest.raises(ValueError, match="'seeded_refinement' needs samples without partners: unpaired="):
        hf_stitch.stitch(a, b, x, matcher="seeded_refinement", **CUT)
    with pytest.raises(ValueError, match=r"unpaired must be a tuple or None, got torch.Tensor"):
        hf_stitch.stitch(a, b, x, matcher="seeded_refinement", unpaired=x, **CUT)
    with pytest.raises(ValueError, match="unpaired samples of the source must be at least 2, got 1"):
        hf_stitch.stitch(a, b, x, matcher="seeded_refinement", unpaired=(x[:1], x), **CUT)
    with pytest.raises(ValueError, match=r"'unsupervised.*fitted to rows, and a grid keeps moments only"):
        hf_stitch.stitch_grid(
            a, b, hf_stitch.Samples.of(x, label=[0] * 900), matchers=[ALONE], task="image-classification",
            progress=False,
        )  # fmt: skip
