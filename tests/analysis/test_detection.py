"""Figures of detectors, their noise and their halves: against other code, and on planted cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch import nn

import hf_stitch
from hf_stitch.analysis.detection import recording, watching
from hf_stitch.analysis.detection.discrimination import auroc, binned, discrimination, equivalent_dose, sided
from hf_stitch.analysis.detection.evidence import Evidence, Watchers
from hf_stitch.analysis.detection.noise import Noise, folds, halves, random_rows
from hf_stitch.analysis.detection.recording import recorded
from hf_stitch.analysis.detection.result import Detection
from hf_stitch.analysis.detection.watching import crossfitted
from hf_stitch.analysis.grid import StitchGrid
from hf_stitch.detectors.distribution_free import NearestNeighbours
from hf_stitch.registry import registries
from hf_stitch.representation import Representation
from hf_stitch.running import Run
from hf_stitch.tasks.heads import task_named

DOSES = (0.01, 0.03, 0.1, 0.3, 1.0)


def test_padding_has_no_structural_error() -> None:
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    own, other = (Representation(torch.randn(2, 4, 3), "bnd", mask=mask) for _ in "ab")
    padded = own.replace(values=own.values.masked_fill(~mask[..., None], 1e3))
    watchers = Watchers({}, hf_stitch.Samples.of(["a", "b"]))
    for more in ((), (other,)):
        found, expected = (watchers._squares("0", "none", each, *more) for each in (padded, own))
        np.testing.assert_array_equal(found, expected)
    apart = (own.values - other.values)[mask].square().sum()
    assert watchers._squares("0", "none", own, other).sum() == pytest.approx(float(apart), rel=1e-6)


def test_the_record_of_detectors_has_their_options_and_all_data_beside_those_of_the_job() -> None:
    known, outliers, far = (hf_stitch.Samples.of([f"{name} {place}" for place in range(3)]) for name in "abc")
    assert Watchers({"knn": NearestNeighbours(k=2)}, known, outliers, far).record == {
        "detectors": {"knn": {"name": "knn", "k": 2, "normalize": False}},
        "auxiliary_data": outliers.fingerprint, "far_data": far.fingerprint,
    }  # fmt: skip
    assert Watchers({}, known).record == {"detectors": {}, "auxiliary_data": None, "far_data": None}


def test_auroc_is_that_of_scikit_learn_with_the_interval_of_the_bootstrap() -> None:
    g = np.random.default_rng(0)
    negative = g.normal(size=300)
    positive = negative * 0.8 + g.normal(0.7, 0.6, 300)
    labels = [1] * 300 + [0] * 300
    value, low, high = auroc(positive, negative, paired=True)
    assert value == pytest.approx(roc_auc_score(labels, np.concatenate([positive, negative])))
    drawn = []
    for _ in range(400):
        rows = g.integers(0, 300, 300)
        drawn.append(roc_auc_score(labels, np.concatenate([positive[rows], negative[rows]])))
    np.testing.assert_allclose([low, high], np.quantile(drawn, [0.025, 0.975]), atol=0.01)
    apart = auroc(positive, negative[:200], paired=False)
    assert apart[0] == pytest.approx(roc_auc_score(labels[:500], np.concatenate([positive, negative[:200]])))
    assert apart[2] - apart[1] > high - low  # pairs are correlated


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_no_evidence(broken: float) -> None:
    good, bad = np.arange(9.0), np.array([broken, *range(8)])
    for scores in ((good, bad), (bad, good)):
        with pytest.raises(ValueError, match="1 of 9 that are NaN or infinite"):
            auroc(*scores, paired=True)
        for two_sided in (False, True):
            with pytest.raises(ValueError, match="1 of 9 that are NaN or infinite"):
                discrimination(*scores, two_sided=two_sided, paired=True)
    with pytest.raises(ValueError, match="requires scores, got none"):
        auroc(good, good[:0], paired=False)


def detected(own: Any, known: Any, far: Any, doses: Any, least: float, **stitched: Any) -> Detection:
    """What a detector tells of models, from its scores."""
    activations = Representation(torch.randn(40, 3), "bd")
    layer = watching.Layer(Noise.of([activations], range(40), 0), {}, {"knn": known}, {"knn": far})
    ids: dict[str, Any] = {"known_ids": range(len(known)), "far_ids": range(40, 40 + len(far))}
    watch = watching.Watch({"knn": NearestNeighbours()}, 0, {"bn1": layer}, kinds=("coloured",), **ids)
    noisy = {f"coloured.{number}.knn": scores for number, scores in enumerate(doses)}
    models = {(name, "a", "bn1"): {"knn": scores} for name, scores in stitched.items()}
    evidence = Evidence(watch, "knn", False, range(len(own)), {"bn1": {"knn": own}}, {"bn1": noisy}, models)
    return evidence.detect(["a"], least)


def test_scores_that_are_not_finite_are_recorded_as_undefined() -> None:
    far = np.arange(20.0)
    doses = [far / 2 + 10 * number for number in range(5)]
    found = detected(far / 2, np.full(9, np.nan), far + 9, doses, 0, m=far * np.nan, n=far)
    assert set(found.undefined) == {"m: a -> bn1", "bn1, control train"}
    assert "20 of 20 that are NaN" in found.undefined["m: a -> bn1"]
    assert all(np.isnan(values).all() for values in found.figures["m"].values())
    assert np.isfinite(found.figures["n"]["auroc"]).all() and np.isnan(found.controls["train"]).all()


@pytest.mark.parametrize(("last", "least", "blind"), [(0.0, 0.8, True), (0.0, 0.0, False), (30.0, 0.8, False)])
def test_where_a_detector_fails_its_figures_are_nan(last: float, least: float, blind: bool) -> None:
    scores = np.arange(40.0)
    doses = [scores + last * (number == 4) for number in range(5)]
    found = detected(scores, scores + 0.5, scores + 99.5, doses, least, m=scores + 5)
    assert list(found.blind) == ["bn1"] * blind
    assert np.isnan(found.figures["m"]["auroc"]).all() == blind
    assert np.isfinite(found.controls["far"]).all() and np.isfinite(found.doses["coloured"]).all()


def test_paired_scores_are_drawn_together() -> None:
    scores = np.random.default_rng(0).normal(size=200)
    spread = {}
    for paired in (True, False):
        found = discrimination(scores, scores, two_sided=False, paired=paired)
        spread[paired] = found["fpr95"][2] - found["fpr95"][1]
    assert spread[True] < 0.02 < 0.04 < spread[False]


@pytest.mark.parametrize(("n", "m"), [(150, 150), (80, 200)])
def test_precision_and_false_positives_are_those_of_scikit_learn_with_ties(n: int, m: int) -> None:
    g = np.random.default_rng(0)
    strange, own = g.normal(0.7, 1, n).round(1), g.normal(0, 1, m).round(1)
    found = discrimination(strange, own, two_sided=False, paired=n == m)
    truth, scores = np.r_[np.ones(n), np.zeros(m)], np.r_[strange, own]
    rates, recalls, _ = roc_curve(truth, scores, drop_intermediate=False)
    assert found["aupr"][0] == pytest.approx(average_precision_score(truth, scores))
    assert found["fpr95"][0] == pytest.approx(rates[np.argmax(recalls >= 0.95)])
    for name in ("aupr", "fpr95"):
        value, low, high = found[name]
        assert low < value < high
    drawn = []
    for _ in range(300):
        up, down = g.integers(0, n, n), g.integers(0, m, m)
        drawn.append(average_precision_score(truth, np.r_[strange[up], own[up if n == m else down]]))
    np.testing.assert_allclose(found["aupr"][1:], np.quantile(drawn, [0.025, 0.975]), atol=0.03)


def test_scores_that_are_unusually_small_are_strange_for_two_sided_detectors_only() -> None:
    g = np.random.default_rng(0)
    own = g.normal(size=2000)
    found = discrimination(own / 10, own, two_sided=True, paired=True)
    assert found["one_sided"][0] == pytest.approx(0.5, abs=0.02)
    assert found["auroc"][0] == found["two_sided"][0] < 0.1  # all in the middle: no tail is
    shrunk = discrimination(own - 3, own, two_sided=True, paired=True)
    assert shrunk["one_sided"][0] < 0.05 and shrunk["auroc"][0] > 0.9
    assert set(np.argsort(np.abs(sided(own, own) - 0.5))[:10]) <= set(np.argsort(np.abs(own - np.median(own)))[-100:])


@pytest.mark.parametrize("two_sided", [False, True])
def test_equal_distributions_have_half_in_the_interval(two_sided: bool) -> None:
    inside, values = 0, []
    for seed in range(200):
        strange, own = np.random.default_rng(seed).normal(size=(2, 150))
        found = discrimination(strange, own, two_sided=two_sided, paired=True)["auroc"]
        inside += found[1] <= 0.5 <= found[2]
        values.append(found[0])
    assert np.mean(values) == pytest.approx(0.5, abs=0.006)
    assert 180 <= inside <= 198


def test_equivalent_doses_are_interpolated_and_the_smallest_where_detection_saturates() -> None:
    doses = np.array([0.5, 0.6, 0.7, 0.8, 0.9])
    found = equivalent_dose(np.array([0.4, 0.6, 0.65, 0.9, 0.95, np.nan]), doses, DOSES)
    np.testing.assert_allclose(found, [0, 0.03, (0.03 * 0.1) ** 0.5, 1.0, np.inf, np.nan])
    assert np.isnan(equivalent_dose(np.array([0.6]), np.full(5, np.nan), DOSES)).all()
    blind = equivalent_dose(np.array([0.45, 0.5, 0.55]), np.array([0.5, 0.49, 0.4, 0.5, 0.48]), DOSES)
    assert blind.tolist() == [0, 0, np.inf]  # no noise is as easy to tell: the far control tells what that means
    doses = np.array([0.6, 0.9, 1.0, 1.0, 1.0])
    found = equivalent_dose(np.array([0.6, 0.9, 0.99999, 1.0]), doses, DOSES)
    np.testing.assert_allclose(found, [0.01, 0.03, 0.1, 0.1], rtol=1e-3)
    steps = np.array([0.5, 0.8, 0.8, 0.75, 0.9])  # .75 after .8 counts as .8
    found = equivalent_dose(np.array([0.8, 0.80001, 0.85, 0.9]), steps, DOSES)
    np.testing.assert_allclose(found, [0.03, 0.3, 0.3**0.5, 1.0], rtol=1e-3)
    np.testing.assert_allclose(equivalent_dose(np.array([0.99, 1.0]), np.ones(5), DOSES), [0, 0.01])


@pytest.mark.parametrize("name", ["mahalanobis", "knn", "likelihood_ratio", "classifier"])
def test_the_same_distribution_is_not_told_apart_and_a_far_one_is(name: str) -> None:
    detector = registries.detectors.build(name)
    values = {"same": list[Any](), "far": list[Any]()}
    for seed in range(3 if name == "classifier" else 6):
        g = np.random.default_rng(seed)
        known, own, other = (g.standard_normal((200, 4, 3)) for _ in range(3))
        folds = (g.permutation(200) < 100,) * 2
        for what, strange in (("same", other), ("far", other + 4)):
            if detector.auxiliary == "stitched":
                scores = crossfitted(detector, own, strange, folds)
            else:
                scorer = detector.fit([Representation(torch.from_numpy(known), "bnd")])
                scores = tuple(scorer.score(Representation(torch.from_numpy(x), "bnd")).numpy() for x in (strange, own))
            values[what].append(discrimination(*scores, two_sided=detector.two_sided, paired=True)["auroc"])
    same, far = np.mean(values["same"], 0), np.array(values["far"])
    assert same[0] == pytest.approx(0.5, abs=0.04) and same[1] < 0.5 < same[2]
    assert (far[:, 1] > 0.9).all()


def test_halves_and_positions_depend_on_ids_alone() -> None:
    ids = [f"image {i}" for i in range(101)]
    second = halves(ids, 0, "control")
    assert second.sum() == 51 and not np.array_equal(second, halves(ids, 1, "control"))
    order = np.random.default_rng(0).permutation(101)
    fold = folds(ids, 0)
    assert 30 < fold.sum() < 71 and np.array_equal(fold[7:9], folds(ids[7:9], 0))
    assert np.array_equal(halves([ids[i] for i in order], 0, "control"), second[order])
    values = torch.arange(3 * 40.0).view(3, 1, 5, 8)
    rows = random_rows(Representation(values, "bchw"), ids[:3], 0, "positions")
    assert rows.shape == (3, 8, 1) and all(len(set(sample.flatten().tolist())) == 8 for sample in rows)
    assert torch.equal(random_rows(Representation(values[1:2], "bchw"), ids[1:2], 0, "positions")[0], rows[1])
    means = random_rows(Representation(values, "bchw"), ids[:3], 0, "samples")
    assert torch.equal(means[:, 0, 0], values.mean((1, 2, 3)))
    mask = torch.tensor([[0, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    text = Representation(torch.arange(10.0).view(2, 5, 1), "bnd", mask)
    assert set(random_rows(text, ids[:2], 0, "positions")[0].flatten().tolist()) <= {1.0, 2.0}
    with pytest.raises(ValueError, match="sample 'image 1' lacks positions"):
        random_rows(text.replace(mask=mask & torch.tensor([[True], [False]])), ids[:2], 0, "positions")


def test_noise_has_the_size_and_the_covariance_that_it_claims() -> None:
    g = torch.Generator().manual_seed(0)
    mixed = torch.randn(4, 4, generator=g)
    values = torch.einsum("bchw,cd->bdhw", torch.randn(400, 4, 5, 5, generator=g), mixed) + 1
    own = Representation(values, "bchw")
    left = torch.randn(9, 25, 4, generator=g) * torch.tensor([5.0, 1, 1, 1])
    source = Noise.of([own], range(400), 0, list(left))
    assert source.kinds == ("coloured", "isotropic", "residual")
    drawn = {kind: source.sample(kind, own, range(400, 800), 0) for kind in source.kinds}
    for noise in drawn.values():
        assert noise.square().sum() / values.square().sum() == pytest.approx(1, rel=0.06)
    shapes = {
        "coloured": values.transpose(0, 1).flatten(1).cov(), "isotropic": torch.eye(4),
        "residual": left.flatten(0, 1).T.cov(),
    }  # fmt: skip
    for kind, expected in shapes.items():
        found = drawn[kind].transpose(0, 1).flatten(1).cov()
        torch.testing.assert_close(found / found.trace(), expected / expected.trace(), atol=0.05, rtol=0)
    with pytest.raises(ValueError, match="all positions of 9 samples are equal"):
        Noise.of([Representation(torch.ones(9, 4), "bd")], range(9), 0)
    assert Noise.of([own], range(400), 0).kinds == ("coloured", "isotropic")


def test_coloured_noise_varies_between_positions_as_the_activations_do() -> None:
    """All positions of a sample are equal here, and so is the noise, which the mean over positions does not cancel."""
    g = torch.Generator().manual_seed(0)
    own = Representation(torch.randn(300, 1, 3, generator=g).expand(300, 6, 3), "bnd")
    source = Noise.of([own], range(300), 0)
    noise = {kind: source.sample(kind, own, range(300), 0) for kind in source.kinds}
    assert torch.equal(noise["coloured"], noise["coloured"][:, :1].expand(300, 6, 3))
    assert noise["coloured"].mean(1).square().sum() > 5 * noise["isotropic"].mean(1).square().sum()


def test_noise_depends_neither_on_the_order_of_samples_nor_on_their_batch_nor_on_padding() -> None:
    g = torch.Generator().manual_seed(0)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[0, 4:] = mask[1, 1:3] = False  # on the right of one text, on the left of another, after one prefix token
    own = Representation(torch.randn(3, 6, 5, generator=g), "bnd", mask=mask, prefix_tokens=1)
    residuals = [torch.randn(1 + n, 5, generator=g) for n in (2, 4)]
    source = Noise.of([own], "abc", 7, residuals)
    first = own.replace(values=own.values[:1, :4], mask=mask[:1, :4])
    second = own.replace(values=own.values[1:2, [0, 3, 4, 5]], mask=mask[1:2, [0, 3, 4, 5]])
    order = [2, 0, 1]
    turned = Noise.of([own.replace(values=own.values[order], mask=mask[order])], "cab", 7, residuals)
    for kind in source.kinds:
        noise = source.sample(kind, own, range(3), 7)
        assert not noise[~mask].any() and noise[mask].all()
        torch.testing.assert_close(source.sample(kind, first, [0], 7), noise[:1, :4])
        torch.testing.assert_close(source.sample(kind, second, [1], 7), noise[1:2, [0, 3, 4, 5]])
        torch.testing.assert_close(turned.sample(kind, own, range(3), 7), noise)


def test_prefix_tokens_get_noise_of_their_own_size() -> None:
    """A detector that reads them would otherwise take any change of them for a large dose."""
    g = torch.Generator().manual_seed(0)
    mixed = torch.randn(4, 4, generator=g, dtype=torch.float64)
    values = torch.randn(500, 8, 4, generator=g, dtype=torch.float64)
    values[:, 0] = 30 * values[:, 0] @ mixed + 50  # a class token, far larger than positions
    values[:, 1] = 7.0  # a register that is the same in all samples
    own = Representation(values, "bnd", prefix_tokens=2, grid=(2, 3))
    source = Noise.of([own.replace(values=part) for part in values.split(150)], range(500), 0, list(values[:9] * 2))
    for kind in source.kinds:
        noise = source.sample(kind, own, range(500, 1000), 0)
        for place in (0, 2, 7):
            sizes = noise[:, place].square().sum() / values[:, place].square().sum()
            assert sizes == pytest.approx(1, rel=0.5), (kind, place)
    coloured = source.sample("coloured", own, range(500, 1000), 0)
    assert not coloured[:, 1].any()  # it has no covariance
    found, expected = coloured[:, 0].T.cov(), values[:, 0].T.cov()
    torch.testing.assert_close(found / found.trace(), expected / expected.trace(), atol=0.12, rtol=0)
    # One donor gives both, so that class token and positions vary together.
    alike = torch.cat([values[:, :1], values[:, :1]], 1)
    both = Noise.of([Representation(alike, "bnd", prefix_tokens=1)], range(500), 0)
    drawn = both.sample("coloured", Representation(alike, "bnd", prefix_tokens=1), range(500), 0)
    torch.testing.assert_close(drawn[:, 0], drawn[:, 1])
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        Noise.of([own.replace(values=values[:1])], range(1), 0)


@pytest.mark.parametrize("kind", ["coloured", "residual"])
def test_no_donor_of_noise_is_in_both_folds(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    own = Representation(torch.randn(200, 3, 4, generator=g), "bnd")
    source = Noise.of([own], range(200), 0, list(torch.randn(20, 3, 4, generator=g)))
    noise, second = source.sample(kind, own, range(200), 5), folds(range(200), 5)
    first, other = ({tuple(row) for row in noise[chosen].flatten(1).tolist()} for chosen in (~second, second))
    assert not first & other and min(len(first), len(other)) > 8


def test_activations_in_memory_and_in_a_file_are_the_same() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 2))
    network = hf_stitch.load(net, example_inputs=torch.randn(2, 3, 8, 8))
    data = {f"{n} samples": hf_stitch.Samples.of(torch.randn(n, 3, 8, 8)) for n in (7, 5)}
    options: Any = {"view": "none", "run": Run(batch_size=3), "task": task_named(None)}
    kept = {layer: parts for layer, parts in recorded(network, ["0", "2"], data, **options)}
    for memory, runs in ((2**31, 1), (12 * 4 * 36 * 4, 2), (10, 2)):
        calls, original = [0], type(network).encode

        def counted(self: Any, *given: Any, calls: Any = calls, original: Any = original) -> Any:
            calls[0] += 1
            return original(self, *given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(network), "encode", counted)
            for layer, parts in recorded(network, ["0", "2"], data, memory=memory, **options):
                for own, expected in zip(parts, kept[layer], strict=True):
                    assert all(torch.equal(a.values, b.values) for a, b in zip(own, expected, strict=True))
        assert calls[0] == 1 + runs * (3 + 2)
    assert recording.MEMORY == 2**31


def test_batches_from_a_file_are_on_the_device_of_the_network_with_their_masks() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    batches = [Representation(torch.randn(2, 3, 4), "bnd", mask), Representation(torch.randn(2, 4), "bd")]
    moved = recording._OnDevice(batches, torch.device("meta"))
    for _ in range(2):  # detectors iterate several times
        first, second = moved
        assert first.values.device.type == second.values.device.type == "meta"
        assert first.mask is not None and first.mask.device.type == "meta" and second.mask is None


def test_samples_of_another_size_are_refused() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2))
    network = hf_stitch.load(net, example_inputs=torch.randn(2, 3, 8, 8))
    data = {name: hf_stitch.Samples.of(torch.randn(5, 3, side, side)) for name, side in (("known", 8), ("far_data", 9))}
    with pytest.raises(ValueError, match=r"'0' outputs bchw 4 7x7 for sample 0 of far_data and bchw 4 6x6 for the"):
        list(recorded(network, ["0"], data, "none", Run(4), task_named(None)))


def test_histograms_count_all_scores_in_the_same_bins() -> None:
    g = np.random.default_rng(0)
    own, strange = g.standard_cauchy(400), g.standard_cauchy(300) + 5  # one bin of the whole range has nearly all
    found = binned(strange, own)
    assert found["own"].sum() == 400 and found["stitched"].sum() == 300
    assert np.isinf(found["edges"][[0, -1]]).all() and np.allclose(np.diff(found["edges"][1:-1], 2), 0)
    assert found["own"].argmax() < found["stitched"].argmax() and found["own"].max() < 300
    equal = binned(np.zeros(5), np.zeros(4))  # scores without variance
    assert equal["own"].sum() == 4 and equal["stitched"].sum() == 5


@pytest.mark.parametrize(
    ("noise", "far", "train", "min_auroc", "why"),
    [
        (0.8, 0.9, (0.55, 0.5, 0.6), 0.8, ""),
        (
            0.79,
            0.9,
            (0.5, 0.5, 0.5),
            0.8,
            "distinguishes noise as large as the activations with an AUROC of only 0.790",
        ),
        (0.79, 0.9, (0.5, 0.5, 0.5), 0.7, ""),
        (np.nan, 0.9, (0.5, 0.5, 0.5), 0.8, "could not be tested on noise as large as the activations"),
        (0.8, 0.89, (0.5, 0.5, 0.5), 0.8, "distinguishes far samples with an AUROC of only 0.890"),
        (0.8, 0.1, (0.5, 0.5, 0.5), 0.8, "distinguishes far samples with an AUROC of only 0.100"),
        (0.8, 0.9, (0.6, 0.56, 0.64), 0.8, "distinguishes test samples from the samples that it was fitted to"),
        (0.8, 0.9, (0.4, 0.36, 0.44), 0.8, "distinguishes test samples from the samples that it was fitted to"),
        (0.8, 0.9, (np.nan,) * 3, 0.8, "could not be tested on the samples that it was fitted to"),
        (0.8, 0.9, (0.6, 0.54, 0.66), 0.8, ""),  # so few samples that it may be chance
        (0.1, 0.1, (0.9, 0.9, 0.9), 0.0, ""),
    ],
)
def test_a_detector_must_work_before_it_judges(
    noise: float, far: float, train: tuple[float, ...], min_auroc: float, why: str
) -> None:
    controls = {"far": np.array([[far] * 3]), "train": np.array([train])}
    doses = {"coloured": np.array([[[0.5] * 3] * 4 + [[noise] * 3]])}
    found = Detection("knn", ("bn1",), True, {}, doses, controls, min_auroc=min_auroc)
    assert [text.split(" (")[0] for text in found.blind.values()] == [why] * bool(why)


@pytest.mark.parametrize(("min_auroc", "blind"), [(0.8, {"bn1": "is undefined: too few positions"}), (0.0, {})])
def test_a_detector_without_noise_is_blind_unless_all_count(min_auroc: float, blind: dict[str, str]) -> None:
    doses, why = {"coloured": np.full((1, 5, 3), np.nan)}, {"bn1 with coloured noise 1": "too few positions"}
    assert Detection("knn", ("bn1",), True, {}, doses, {}, why, min_auroc=min_auroc).blind == blind


def test_layers_where_a_detector_is_blind_are_marked() -> None:
    far = np.array([[0.5, 0.4, 0.6], [0.9, 0.8, 1.0]])
    found = Detection("knn", ("b0", "b1"), True, {}, {"coloured": np.ones((2, 5, 3))}, {"far": far})
    assert [*found.blind] == ["b0"] and found.caution.startswith("knn is not evidence at b0: it distinguishes far")
    both = Detection("knn", ("b0", "b1"), True, {}, {"coloured": np.zeros((2, 5, 3))}, {})
    assert both.caution.startswith("knn is not evidence at b0, b1: at b0, it distinguishes noise as large as")
    assert not Detection("knn", ("b0",), True, {}, {"coloured": np.ones((1, 5, 3))}, {}).caution
    table = found.to_pandas()
    assert set(table["layer"][table["blind"]]) == {"b0"} and set(table["layer"][~table["blind"]]) == {"b1"}
    scores = {"m": {"agreement": np.full((1, 2, 3), 0.5), "auroc(knn)": np.full((1, 2, 3), 0.7)}}
    grid = StitchGrid(
        scores, {}, {"m": {"agreement": np.ones((2, 1, 2))}}, ("a0",), ("b0", "b1"), "text-generation", "none", 9,
        {"knn": found},
    )  # fmt: skip
    labels = {
        figure: [text.get_text() for text in grid.plot(figure).axes[0].get_xticklabels()]
        for figure in ("agreement", "auroc(knn)")
    }
    assert labels == {"agreement": ["b0", "b1"], "auroc(knn)": ["b0 (blind)", "b1"]}
    for asked in (grid.as_good, grid.identify):
        with pytest.raises(KeyError, match=r"one with p-values, agreement.*, got 'auroc\(knn\)'"):
            asked("auroc(knn)")
