"""Correlations agree with scipy, the jackknife with one written out, and planted distances have the known ranking."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_studies import Bench, BenchGroup
from hf_stitch_studies.benching.correlation import RELIABILITY, bench_score, fisher, jackknife, rank_correlations
from hf_stitch_studies.benching.distances import BenchPair, Distance, metric_distances, structural_distances
from hf_stitch_studies.benching.measuring import Bases, BenchData, best_of_networks, measure
from scipy.stats import kendalltau, spearmanr, t

from hf_stitch.analysis import Activations, Score

NETWORKS = tuple("abcdef")
LONG: dict[str, Any] = {"probe_epochs": 25, "probe_batch_size": 16}
"""Probes of few samples that are trained to the end."""


@pytest.mark.parametrize("seed", range(5))
def test_correlations_are_those_of_scipy_with_ties(seed: int) -> None:
    random = np.random.default_rng(seed)
    x, y = random.integers(0, 6, (2, 40)).astype(float)
    tau, rho = rank_correlations(x, y)
    assert tau == pytest.approx(kendalltau(x, y).statistic)
    assert rho == pytest.approx(spearmanr(x, y).statistic)


def test_correlations_without_an_order_are_undefined() -> None:
    for x, y in (([1.0, 1, 1], [1.0, 2, 3]), ([1.0, 2, 3], [2.0, 2, 2]), ([1.0, 2], [1.0, 2]), ([], [])):
        assert all(map(math.isnan, rank_correlations(np.array(x), np.array(y))))


def test_the_jackknife_of_a_mean_is_the_interval_of_student() -> None:
    values = dict(zip("abcdefgh", np.random.default_rng(0).standard_normal(8), strict=True))
    [score] = jackknife(lambda out: np.array([np.mean([v for k, v in values.items() if k != out])]), list(values))
    sample = np.array(list(values.values()))
    low, high = t.interval(0.95, 7, sample.mean(), sample.std(ddof=1) / math.sqrt(8))
    assert (score.value, score.low, score.high) == pytest.approx((sample.mean(), low, high))


def group(seed: int, layer: str = "", ranks: tuple[int, ...] = (8, 4, 2), **distances: Any) -> BenchGroup:
    """A group with a planted accuracy: better at higher ranks, with noise; each network's first is a reference."""
    random = np.random.default_rng(seed)
    networks = tuple(n for n in NETWORKS for _ in ranks)
    accuracy = np.tile(0.5 + 0.05 * np.arange(len(ranks))[::-1], len(NETWORKS)) + 0.02 * random.random(len(networks))
    full = np.array([place for place in range(len(networks)) if place % len(ranks) == 0])
    references = tuple(int(place) for place in full[np.argsort(-accuracy[full])])
    gaps = np.abs(accuracy[list(references)][:, None] - accuracy)
    rank = np.array(ranks * len(NETWORKS), float)
    return BenchGroup(
        "sensitivity" if layer else "specificity", layer, networks, ("l",) * len(networks), ranks * len(NETWORKS),
        accuracy, accuracy, references,
        {
            "exact": 3 * gaps, "random": random.random(gaps.shape), "rank metric": np.tile(1 - np.sqrt(rank), (6, 1)),
            "depth only": np.zeros(gaps.shape), "rank only": np.tile(8 - rank, (6, 1)), **distances,
        },
    )  # fmt: skip


def by_hand(groups: list[BenchGroup], method: str, without: str | None, minus: str | None = None) -> float:
    """τ of the best reference that is left, written out."""
    found = []
    for each in groups:
        number, place = next((k, p) for k, p in enumerate(each.references) if each.networks[p] != without)
        chosen = [
            j for j, network in enumerate(each.networks)
            if network not in (without, each.networks[place]) and not np.isnan(each.distances[method][number, j])
        ]  # fmt: skip
        gaps = [abs(each.accuracy[place] - each.accuracy[j]) for j in chosen]
        tau = kendalltau([each.distances[method][number, j] for j in chosen], gaps).statistic
        if minus:
            tau -= kendalltau([each.distances[minus][number, j] for j in chosen], gaps).statistic
        found.append(tau)
    return float(np.mean(found))


@pytest.mark.parametrize("method", ["exact", "random", "rank metric", "rank only"])
def test_scores_are_those_of_a_jackknife_written_out(method: str) -> None:
    groups = [group(1, "x"), group(2, "y")]
    score = bench_score(groups, method, NETWORKS, own_network=False)
    for found, minus in ((score.tau, None), (score.beyond.get("rank only"), "rank only")):
        if found is None:
            continue
        left = np.array([by_hand(groups, method, name, minus) for name in NETWORKS])
        error = math.sqrt(5 / 6 * ((left - left.mean()) ** 2).sum())
        assert found.value == pytest.approx(by_hand(groups, method, None, minus))
        reach = t.ppf(0.975, 5) * error
        if minus is None and abs(found.value) < 1:  # Fisher's z
            z, half = math.atanh(found.value), reach / (1 - found.value**2)
            ends = [math.tanh(z - half), math.tanh(z + half)]
        else:
            ends = [found.value - reach, found.value + reach]
        assert [found.low, found.high] == pytest.approx(ends)


@pytest.mark.parametrize(("low", "value", "high"), [(-0.04, 0.56, 1.16), (-1.3, -0.9, -0.5), (0.4, 1.0, 1.6)])
def test_intervals_of_correlations_stay_in_their_range(low: float, value: float, high: float) -> None:
    found = fisher(Score(value, low, high))
    assert -1 <= found.low <= found.value <= found.high <= 1 and found.value == value


def test_the_planted_ranking_is_found() -> None:
    groups = [group(1)]
    exact = bench_score(groups, "exact", NETWORKS, own_network=False)
    assert exact.tau.value == exact.rho.value == exact.tau.low == 1 and exact.beats is True
    noise = [bench_score([group(seed)], "random", NETWORKS, own_network=False) for seed in range(20)]
    assert sum(score.tau.low <= 0 <= score.tau.high for score in noise) >= 17
    assert not any(score.beats for score in noise)
    rank = bench_score(groups, "rank metric", NETWORKS, own_network=False)
    only = bench_score(groups, "rank only", NETWORKS, own_network=False)
    assert (rank.tau, rank.rho, rank.spread) == (only.tau, only.rho, only.spread)
    assert rank.beyond["rank only"].value == rank.beyond["rank only"].low == 0 and rank.beats is False
    assert math.isnan(rank.beyond["depth only"].value) and only.beats is None


def test_undefined_pairs_are_left_out_and_counted_on_both_sides_of_a_difference() -> None:
    whole = group(3)
    partial = whole.distances["exact"].copy()
    partial[:, ::5] = np.nan
    score = bench_score([group(3, partial=partial)], "partial", NETWORKS, own_network=False)
    assert score.tau.value == 1 and (score.pairs, score.undefined) == (15, 3)
    left = np.array([j for j in range(18) if j % 5 and whole.networks[j] != whole.networks[whole.references[0]]])
    expected = 1 - kendalltau(whole.distances["rank only"][0, left], whole.gaps[0, left]).statistic
    assert score.beyond["rank only"].value == pytest.approx(expected)
    nowhere = bench_score([group(3, none=np.full((6, 18), np.nan))], "none", NETWORKS, own_network=False)
    assert math.isnan(nowhere.tau.value) and nowhere.beats is None and nowhere.undefined == 15


def test_own_representations_are_compared_only_if_asked() -> None:
    one = group(4)
    place = one.references[0]
    assert one.compared(0, own_network=False).sum() == 15
    own = one.compared(0, own_network=True)
    assert own.sum() == 17 and not own[place]
    assert one.compared(0, own_network=True, without="a").sum() == (14 if one.networks[place] != "a" else 15)


def test_references_are_the_best_of_each_network() -> None:
    accuracy = np.array([0.9, 0.8, 0.7, 0.95, 0.1, 0.9])
    assert best_of_networks("aabbcc", np.ones(6, bool), accuracy, 5) == (3, 0, 5)
    assert best_of_networks("aabbcc", np.array([0, 1, 1, 0, 1, 1], bool), accuracy, 2) == (5, 1)


# -- on activations ----------------------------------------------------------------------------------------------------


def planted(networks: int = 4, layers: int = 3, width: int = 6, n: int = 400, seed: int = 0) -> BenchData:
    """Layers of several networks in which the classes are the further apart, the deeper the layer."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (2, n), generator=generator)
    sides: list[dict[str, Activations]] = []
    maps = torch.linalg.qr(torch.randn(networks, width, width, generator=generator)).Q
    for side in range(2):
        hidden = [
            torch.nn.functional.one_hot(labels[side], width) * (depth + 1.0)
            + torch.randn(n, width, generator=generator)
            for depth in range(layers)
        ]  # fmt: skip
        sides.append(
            {
                f"n{i}": Activations({f"l{d}": hidden[d] @ maps[i] for d in range(layers)}, range(n), "mean")
                for i in range(networks)
            }
        )
    half = n // 2
    return BenchData(*sides, *labels.tolist(), range(half), range(half, n), 3)


class Recorder(Distance):
    """A distance that keeps what it is given."""

    kind = "metric"

    def __init__(self) -> None:
        self.seen: list[BenchPair] = []

    def __call__(self, pair: BenchPair) -> float:
        self.seen.append(pair)
        if pair.other.rank == 1:
            raise ValueError("undefined at rank 1")
        return float(len(self.seen))


def test_distances_see_the_right_rows() -> None:
    data, recorder = planted(), Recorder()
    found = measure(data, {"d": recorder}, sensitivity_layers=["l1"], ranks=[3, 1], references=2, probe_epochs=2)
    assert [(g.test, g.layer, len(g.networks)) for g in found.groups] == [
        ("sensitivity", "l1", 12),
        ("specificity", "", 12),
    ]
    scoring = list(data.scoring)
    for pair in recorder.seen:
        a, b = pair.reference, pair.other
        assert a.rank == 6 and (a.network, a.depth, a.rank) != (b.network, b.depth, b.rank)
        train, test = data.rows(b.network, b.depth)
        assert torch.linalg.matrix_rank(b.rows - train.double().mean(0)) == b.rank
        centre = train.double().mean(0)
        directions = torch.linalg.svd(train.double() - centre).Vh[: b.rank]
        torch.testing.assert_close(b.rows, centre + (test[scoring].double() - centre) @ directions.T @ directions)
        assert len(b.train_rows) == len(train)
    undefined = {"undefined at rank 1": 2 * 4}  # of each of two references, from four networks
    assert found.undefined == {"d": undefined}
    assert found.scores["sensitivity"]["d"].undefined == 3
    assert list(found.kinds) == ["d", "depth only", "rank only", RELIABILITY]


def test_accuracies_are_those_of_probes_and_the_halves_are_kept_apart() -> None:
    data = planted()
    found = measure(data, metric_distances(["linear_cka"]), sensitivity_layers=[], references=3, **LONG)
    (one,) = found.groups
    deep = one.accuracy.reshape(4, 3)
    assert all((np.diff(row) > 0).all() for row in deep)  # deeper layers are planted to be better
    first = one.references[0]
    np.testing.assert_allclose(
        one.distances[RELIABILITY][0], abs(one.selection_accuracy - one.selection_accuracy[first]), atol=1e-12
    )
    assert found.scores["specificity"][RELIABILITY].rho.value > 0.9
    assert {one.layers[place] for place in one.references} == {"l2"} and len(one.references) == 3
    # Other labels on the scoring half change no reference and no accuracy that chooses them; and the reverse.
    labels = np.array(data.test_labels)
    for changed, kept in ((data.scoring, "selection_accuracy"), (data.selection, "accuracy")):
        shuffled = labels.copy()
        shuffled[list(changed)] = (shuffled[list(changed)] + 1) % 3
        other = BenchData(data.train, data.test, data.train_labels, shuffled.tolist(), data.selection, data.scoring, 3)
        again = measure(other, metric_distances(["linear_cka"]), sensitivity_layers=[], references=3, **LONG)
        np.testing.assert_array_equal(getattr(again.groups[0], kept), getattr(one, kept))
    with pytest.raises(ValueError, match="must not share samples, got test sample 200"):
        BenchData(data.train, data.test, data.train_labels, labels.tolist(), range(201), data.scoring, 3)


def test_metrics_matchers_and_baselines_are_scored_in_both_tests() -> None:
    methods = metric_distances(["linear_cka", "procrustes", "cca", "pwcca:directions=all"])
    methods |= structural_distances(["lstsq", "recoloured"])
    found = measure(planted(n=300), methods, ranks=[4, 2, 1], **LONG)
    sensitivity, specificity = found.scores["sensitivity"], found.scores["specificity"]
    assert list(sensitivity) == list(specificity) == [*methods, "depth only", "rank only", RELIABILITY]
    # On planted layers, closer layers are closer in function: every method ranks them well.
    assert all(specificity[name].rho.value > 0.8 for name in methods)
    assert math.isnan(specificity["rank only"].tau.value) and math.isnan(sensitivity["depth only"].tau.value)
    assert all(sensitivity[name].undefined == 0 for name in ("cca", "pwcca(directions=all)", "lstsq, structural"))
    # The residual of least squares grows as directions are lost.
    frame = found.pairs()
    own = frame[(frame.method == "lstsq, structural") & (frame.test == "sensitivity")]
    means = own.groupby("rank").distance.mean()
    assert all(low > high for (_, low), (_, high) in pairwise(means.items()))


def test_a_result_survives_saving(tmp_path: Any) -> None:
    found = measure(planted(), metric_distances(["linear_cka", "cca"]), ranks=[2], probe_epochs=2, references=2)
    found.save(tmp_path / "bench.json")
    loaded = Bench.load(tmp_path / "bench.json")
    assert loaded.to_pandas().equals(found.to_pandas()) and loaded.pairs().equals(found.pairs())
    assert str(loaded) == str(found) and "undefined" in str(found)
    assert len(found.to_pandas()) == 2 * 5 and {"beats", "tau_low", "beyond_rank_only"} <= set(found.to_pandas())
    axes = found.plot().axes
    assert [each.get_title() for each in axes] == ["sensitivity", "specificity"]
    assert found.to_dict()["scores"]["specificity"]["linear_cka"]["pairs"] == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"references": 1}, "references must be an integer >= 2, got 1"),
        ({"sensitivity_layers": ["l9"]}, "sensitivity_layers must be among l0, l1, l2, got 'l9'"),
        ({"ranks": [7]}, "ranks must be from 1 to 6, the width of layer 'l0' of n0, got 7"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(planted(n=40), metric_distances(["linear_cka"]), **options)


def test_wrong_methods_and_networks_are_named() -> None:
    with pytest.raises(ValueError, match="at least one metric, matcher or distance"):
        measure(planted(n=40), {})
    with pytest.raises(ValueError, match=r"three networks, .* got 2"):
        planted(networks=2)
    data = planted(n=40)
    less = {**data.train, "n0": Activations({"l0": torch.randn(40, 6)}, range(40), "mean")}
    with pytest.raises(ValueError, match=r"same number of layers, .* got n0: 1, n1: 3"):
        BenchData(less, data.test, data.train_labels, data.test_labels, data.selection, data.scoring, 3)
    with pytest.raises(ValueError, match="got task_loss, which trains through"):
        structural_distances(["task_loss"])
    with pytest.raises(ValueError, match="lstsq is requested twice"):
        structural_distances(["lstsq", "lstsq"])
    with pytest.raises(TypeError, match="must be a list"):
        structural_distances("lstsq")
    with pytest.raises(TypeError, match="must be a list"):
        metric_distances("linear_cka")


def test_representations_are_taken_at_their_ranks() -> None:
    bases = Bases(planted(), None, [1])
    assert bases.ranks("n0", 1) == (6, 5, 4, 3, 2, 1) and bases.ranks("n0", 0) == (6,)
    assert Bases(planted(), [2], [0]).ranks("n0", 0) == (6, 2)
