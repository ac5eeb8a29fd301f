"""Grids of stitches have the scores of stitches made one by one, and resume to the same bits."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_studies import Energy
from torch import nn

import hf_stitch
from hf_stitch.analysis.detection.result import Detection
from hf_stitch.analysis.grid import StitchGrid, differences_from_best
from hf_stitch.analysis.resampling import not_rejected
from hf_stitch.scoring.measured import with_interval
from hf_stitch.training import TaskLoss
from hf_stitch.training.loop import DivergedError, train

from tiny_networks import CLASSES, network  # isort: skip

LAYERS = {
    "cnn": ("layer1.0", "layer2.0", "layer3.0"),
    "vit": ("vit.layers.0", "vit.layers.2"),
    "bert": ("bert.encoder.layer.0", "bert.encoder.layer.2"),
    "gpt2": ("transformer.h.0", "transformer.h.1"),
    "llama": ("model.layers.0", "model.layers.1"),
}


def made(family: str, seed: int = 0) -> hf_stitch.Adapter:
    return network(family, seed, "float64")


def of(data: Any, *, double: bool) -> hf_stitch.Samples:
    return hf_stitch.Samples.of([{**row, "image": row["image"].double()} for row in data] if double else data)


@pytest.mark.parametrize(
    ("first", "second", "matchers", "pooling"),
    [
        ("cnn", "vit", ["lstsq", "low_rank"], "none"),  # grids of other sizes, class tokens
        ("vit", "cnn", ["ridge"], "none"),
        ("vit", "vit", ["permutation"], "cls"),
        ("bert", "bert", ["lstsq"], "none"),  # padded texts
        ("gpt2", "llama", ["ridge"], "none"),
    ],
)
def test_scores_are_those_of_stitches_made_one_by_one(
    first: str, second: str, matchers: list[str], pooling: Any, images: Any, texts: Any
) -> None:
    a, b = made(first), made(second, 1)
    data = of(images, double=True) if first in ("cnn", "vit") else of(texts, double=False)
    chosen = [hf_stitch.registries.matchers.build(m, **({"rank": 3} if m == "low_rank" else {})) for m in matchers]
    options: dict[str, Any] = {"pooling": pooling, "batch_size": 16, "progress": False}
    layers = {"layers_a": LAYERS[first][:2], "layers_b": LAYERS[second][-2:]}
    grid = hf_stitch.stitch_grid(a, b, data, matchers=chosen, resamples=20, **layers, **options)
    for matcher in chosen:
        for la in layers["layers_a"]:
            for lb in layers["layers_b"]:
                one = hf_stitch.stitch(a, b, data, source_layer=la, target_layer=lb, matcher=matcher, **options)
                assert one.evaluation is not None
                for figure in grid.figures[:-1]:
                    found = grid.score(la, lb, figure, matcher.label).value
                    assert found == pytest.approx(one.evaluation[figure].value, rel=1e-9), (la, lb, figure)
                weights = dict(grid.stitched(la, lb, matcher.label).stitch.state_dict())
                for name, weight in one.stitch.state_dict().items():
                    torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6)
    names = [name for name in grid.baselines if name in one.evaluation.scores]
    assert "target" in names and "mean_only" in names
    for name in names:
        figure = grid.figures[0]
        expected = one.evaluation.scores[name][figure].value
        assert grid.baselines[name][figure].reshape(-1, 3)[-1, 0] == pytest.approx(expected, rel=1e-9), name


@pytest.mark.parametrize("pooling", ["none", "mean"])
def test_the_structural_error_is_that_of_the_activations(pooling: Any, images: Any) -> None:
    a, b, data = made("cnn"), made("cnn" if pooling == "mean" else "vit", 1), of(images, double=True)
    train, test = data.take(60), data.select(range(60, 80))
    la, lb = "layer2.0", "layer3.0" if pooling == "mean" else "vit.layers.2"
    options: dict[str, Any] = {"layers_a": [la], "layers_b": [lb], "pooling": pooling, "progress": False}
    grid = hf_stitch.stitch_grid(a, b, train, test_data=test, **options)
    x, y = (net.encode(net.preprocess(next(iter(test.batches(20))).samples), at)[at] for net, at in ((a, la), (b, lb)))
    mapped = grid.stitched(la, lb).stitch(x).values.double()
    own = y.values
    if pooling == "mean":  # the target receives one position, so that its activations count as their mean
        mapped, own = mapped.flatten(1), own.mean((2, 3))
    expected = (mapped - own).square().sum() / own.square().sum()
    assert grid.score(la, lb, "structural_error").value == pytest.approx(expected.item(), rel=1e-9)


class Viewing(nn.Module):
    """Code behind a cut that calls ``view``, as many image networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3, 2), nn.Conv2d(4, 6, 3, 2), nn.LazyLinear(CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).relu())
        return self.head(x.view(len(x), -1))


def test_the_target_gets_contiguous_activations(images: Any) -> None:
    data = of(images, double=True)
    example = torch.stack([row["image"].double() for row in images[:2]])
    net = Viewing().double()
    net(example)
    b = hf_stitch.load(net.eval(), example_inputs=example)
    options: dict[str, Any] = {"task": "image-classification", "batch_size": 16, "progress": False}
    grid = hf_stitch.stitch_grid(b, b, data, layers_a=["first", "second"], layers_b=["first", "second"], **options)
    one = hf_stitch.stitch(b, b, data, source_layer="first", target_layer="second", **options)
    assert grid.score("first", "second", "agreement").value == one.evaluation["agreement"].value  # type: ignore[index]


def test_trained_stitches_are_those_of_stitch(images: Any) -> None:
    a, b, data = made("cnn"), made("cnn", 1), of(images, double=True)
    matcher = TaskLoss(max_steps=3, batch_size=16)
    layers = {"layers_a": ["layer1.0", "layer2.0"], "layers_b": ["layer2.0"]}
    grid = hf_stitch.stitch_grid(a, b, data, matchers=["lstsq", matcher], progress=False, **layers)
    assert grid.matchers == ("lstsq", matcher.label)
    cut = {"source_layer": "layer1.0", "target_layer": "layer2.0"}
    one = hf_stitch.stitch(a, b, data, **cut, matcher=matcher, progress=False)
    got = grid.stitched("layer1.0", "layer2.0", matcher.label).stitch
    torch.testing.assert_close(got.body.weight, one.stitch.body.weight, rtol=1e-4, atol=1e-5)
    kept = got.body.weight.detach()
    got.half()  # models of a grid do not share their maps
    assert torch.equal(grid.stitched("layer1.0", "layer2.0", matcher.label).stitch.body.weight, kept)


def test_a_plan_counts_what_the_grid_does(images: Any) -> None:
    a, b, images = made("cnn"), made("cnn", 1), of(images, double=True)
    closed = hf_stitch.plan(hf_stitch.stitch_grid, a, b, images, matchers=["lstsq", "procrustes"])
    pairs = len(a.layers) * len(b.layers)
    assert f"{2 * pairs} stitches" in closed.job and "training" not in closed.stages and not closed.disk
    training = TaskLoss(labels="target", max_steps=7, batch_size=16)
    trained = hf_stitch.plan(hf_stitch.stitch_grid, a, b, images, matchers=["lstsq", training], test_size=0.5)
    one = next(iter(images.take(1).batches(1))).samples
    sizes = [activations.values.nbytes for activations in a.encode(a.preprocess(one), a.layers).values()]
    assert trained.disk == {"activations of the source": len(images) // 2 * sum(sizes)}
    assert trained.stages["training"] > 0 < trained.stages["fitting"] < trained.seconds
    watched = hf_stitch.plan(hf_stitch.stitch_grid, a, b, images, detectors=["knn"])
    assert "detectors are not included" in " ".join(str(watched).split())


def test_undefined_stitches_have_reasons_and_are_left_out(images: Any) -> None:
    """20 samples are too few for 24 and 32 channels."""
    a, b, data = made("cnn"), made("cnn", 1), of(images, double=True)
    options: dict[str, Any] = {"test_data": data.select(range(20, 80)), "pooling": "mean", "progress": False}
    few, layers = data.take(20), LAYERS["cnn"]
    grid = hf_stitch.stitch_grid(a, b, few, layers_a=layers, layers_b=layers, matchers=["lstsq", "ridge"], **options)
    assert np.isnan(grid["lstsq"]).tolist() == [[False] * 3, [True] * 3, [True] * 3]
    assert not np.isnan(grid["ridge"]).any() and len(grid.undefined) == 6
    with pytest.raises(ValueError, match=r"lstsq: layer2.0 -> layer1.0 is undefined: .*at least 25 rows, got 20"):
        grid.stitched("layer2.0", "layer1.0", "lstsq")
    assert str(grid).count("undefined") == 3
    assert "6 of 9 stitches are undefined, first lstsq: layer2.0 -> layer1.0" in " ".join(str(grid).split())
    assert grid.to_pandas()["undefined"].notna().sum() == 6 * len(grid.figures)
    with pytest.raises(ValueError, match=r"lstsq is undefined for all pairs of layers: .*at least 25 rows"):
        hf_stitch.stitch_grid(a, b, few, layers_a=["layer2.0"], layers_b=layers, **options)


def test_a_layer_without_any_stitch_still_has_its_mean() -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
    with torch.no_grad():
        nets[1][2].bias.fill_(-100)  # dead: no map into this layer is defined
    a, b = (hf_stitch.load(net.double(), example_inputs=torch.randn(2, 4).double()) for net in nets)
    data = hf_stitch.Samples.of(torch.randn(60, 4).double(), label=[0, 1] * 30)
    options: dict[str, Any] = {"layers_a": ["1", "3"], "layers_b": ["1", "3"], "task": "image-classification"}
    grid = hf_stitch.stitch_grid(a, b, data, resamples=10, progress=False, **options)
    assert np.isnan(grid["lstsq"]).tolist() == [[False, True]] * 2
    dead, target = (grid.baselines[name]["agreement"] for name in ("mean_only", "target"))
    assert dead[1, 0] == target[0] == 1.0  # the mean is what the layer always outputs


def test_p_values_are_small_for_clear_differences_and_large_for_ties() -> None:
    random = np.random.default_rng(0)
    noise = random.normal(0, 0.01, (1001, 1, 1))
    drawn = np.array([[0.9, 0.9, 0.2]]) + noise * np.array([[1.0, -1.0, 1.0]])
    drawn[0] = [[0.9, 0.899, 0.2]]
    rows, columns = differences_from_best(drawn, higher_is_better=True)
    assert rows[0, 0] == 1.0 and rows[0, 1] > 0.5 and rows[0, 2] < 0.01
    assert (columns == 1.0).all()  # each is alone in its column
    many = 0.1 + random.normal(0, 0.001, (1001, 40, 40))
    many[:, range(40), range(40)] += 0.8
    for p_values in differences_from_best(many, higher_is_better=True):  # whatever the number of layers
        assert (not_rejected(p_values, 0.05) == np.eye(40, dtype=bool)).all()


def test_resamples_without_a_figure_are_left_out() -> None:
    random = np.random.default_rng(0)
    drawn = np.array([[0.9, 0.2]]) + random.normal(0, 0.01, (201, 1, 2))
    some = drawn.copy()
    some[5] = np.nan  # as relative accuracies where the target has no correct sample
    rest = np.delete(drawn, 5, 0)
    assert np.array_equal(with_interval(some), with_interval(rest))
    some, rest = (differences_from_best(scores, higher_is_better=True) for scores in (some, rest))
    assert np.allclose(some, rest)


@pytest.mark.parametrize(
    ("task", "figure", "scores"),
    [("image-classification", "relative_accuracy", (0.9, 0.5)), ("text-generation", "relative_perplexity", (1.1, 2.0))],
)
def test_accurate_but_strange_stitches_are_told_whichever_direction_is_better(
    task: str, figure: str, scores: tuple[float, float]
) -> None:
    values = np.array([[[score] * 3 for score in scores]])
    strange = dict.fromkeys(("auroc", "dose", "one_sided"), np.array([[[0.9] * 3] * 2]))
    found = Detection("knn", ("b0", "b1"), False, {"lstsq": strange}, {}, {}, {})
    assert StitchGrid(
        {"lstsq": {figure: values}}, {}, {}, ("a0",), ("b0", "b1"), task, "none", 9, detections={"knn": found}
    ).is_strange().tolist() == [[True, False]]


def test_a_grid_of_diverging_stitches_only_is_an_error(images: Any) -> None:
    a, b, data = network("cnn", 0, "float32"), network("cnn", 1, "float32"), of(images, double=False)
    options: dict[str, Any] = {"layers_a": ["layer1.0", "layer2.0"], "layers_b": ["layer2.0"], "progress": False}
    with pytest.raises(DivergedError, match=r"diverged, first task_loss.*: layer1\.0 -> layer2\.0: .* lower lr"):
        hf_stitch.stitch_grid(a, b, data, matchers=[TaskLoss(max_steps=50, lr=1e37, batch_size=16)], **options)


def test_a_diverging_stitch_spares_the_others(images: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is shown and saved; that others have the same weights is in ``tests/training``."""
    a, b, data = made("cnn"), made("cnn", 1), of(images, double=True)
    layers: dict[str, Any] = {"layers_a": LAYERS["cnn"][:2], "layers_b": ["layer1.0", "layer2.0"]}
    options = {"resamples": 5, "progress": False}
    training = TaskLoss(max_steps=3, batch_size=16)

    def poisoned(stitches: Any, *given: Any, **changed: Any) -> Any:
        """Training makes the second stitch into layer1.0 NaN."""

        def poison(step: int, trained: Any) -> None:
            if step == 2 and stitches.back.cut.layer == "layer1.0":
                trained[1].body.weight.data.fill_(float("nan"))

        return train(stitches, *given, **{**changed, "callback": poison})

    monkeypatch.setattr("hf_stitch.training.task_loss.train", poisoned)
    found = hf_stitch.stitch_grid(a, b, data, matchers=["lstsq", training], **layers, **options)
    name = f"{training.label}: layer2.0 -> layer1.0"
    assert list(found.undefined) == [name]
    assert re.search(r"diverged: the loss is nan at step 2; lower lr \(now 0.001\)", found.undefined[name])
    for figure in found.figures:
        assert np.isnan(found.values(training.label, figure)).tolist() == [[False, False], [True, False]]
        assert np.isfinite(found.values("lstsq", figure)).all()
    with pytest.raises(ValueError, match=r"layer2\.0 -> layer1\.0 is undefined: training diverged: the loss is nan"):
        found.stitched("layer2.0", "layer1.0", training.label)
    assert "1 of 4 stitches are undefined" in " ".join(str(found).split())
    assert found.plot(matcher=training.label).axes
    found.save(tmp_path / "grid.json")
    again = StitchGrid.load(tmp_path / "grid.json")
    assert again.undefined == found.undefined and again.to_pandas().equals(found.to_pandas())
    with pytest.raises(ValueError, match="loaded from a file"):
        again.stitched("layer1.0", "layer1.0", "lstsq")
    with pytest.raises(KeyError, match=r"layer_a must be one of .*, got 'nosuch'"):
        again.score("nosuch", "layer2.0", matcher="lstsq")
    with pytest.raises(KeyError, match="got 'ridge'"):
        again["ridge"]


def test_detectors_tell_what_is_strange_and_how_strange(images: Any) -> None:
    """A network into itself is in distribution; permuted channels are not; noise scores like noise."""
    a, data = made("cnn"), of(images, double=True)
    layers: dict[str, Any] = {"layers_a": ["layer1.0"], "layers_b": ["layer1.0", "layer2.0"]}
    g = torch.Generator().manual_seed(0)
    noise = torch.rand(2, 40, 3, 32, 32, dtype=torch.float64, generator=g)
    far, outliers = hf_stitch.Samples.of(noise[0] * 20), hf_stitch.Samples.of(noise[1] * 9)
    energy = Energy.preset("small", width=4, size=8, epochs=2, fine_tune_epochs=6)
    grid = hf_stitch.stitch_grid(
        a, a, data, matchers=["identity", "random"], detectors=["mahalanobis", "knn:k=3", "likelihood_ratio", energy],
        far_data=far, auxiliary_data=outliers, min_auroc=0, test_size=0.5, progress=False, **layers,
    )  # fmt: skip
    for label, found in grid.detections.items():
        own = grid.score("layer1.0", "layer1.0", f"auroc({label})", "identity")
        assert own.value == 0.5 and own.low == own.high == 0.5
        assert grid.score("layer1.0", "layer1.0", f"dose({label})", "identity").value == 0 or label == energy.label
        assert (np.abs(found.controls["halves"][:, 0] - 0.5) < 0.3).all()
        if label != energy.label:  # two epochs are too few
            assert (found.controls["far"][:, 0] > 0.9).all(), label
            for kind in ("coloured", "isotropic", "residual"):
                weakest, strongest = found.doses[kind][:, 0, 0], found.doses[kind][:, -1, 0]
                assert (strongest > 0.8).all() and (strongest >= weakest).all(), (label, kind)
            if label != "likelihood_ratio":  # of which the smallest dose is enough
                assert (found.doses["coloured"][:, 0, 0] < found.doses["coloured"][:, -1, 0] - 0.1).all(), label
    for label in ("mahalanobis", "likelihood_ratio"):
        assert grid.score("layer1.0", "layer1.0", f"auroc({label})", "random").value > 0.9
        assert grid.score("layer1.0", "layer1.0", f"fpr95({label})", "random").value < 0.3
    again = StitchGrid.from_dict(grid.to_dict())
    assert again.to_pandas().equals(grid.to_pandas()) and str(again) == str(grid)
    assert {"aupr(knn(k=3))", "two_sided(mahalanobis)"} <= set(grid.to_pandas()["figure"])
    detection = again.detections["mahalanobis"]
    assert {"halves", "coloured 0.01"} <= set(detection.to_pandas()["measure"]) and detection.plot("residual").axes
    assert "far" in str(detection) and grid.recipe["auxiliary_data"] == outliers.fingerprint
    counted = again.detections["mahalanobis"].histograms["identity"]
    assert (counted["own"].sum(-1) == grid.n).all() and (counted["stitched"].sum(-1) == grid.n).all()
    assert np.array_equal(counted["own"][0, 0], counted["stitched"][0, 0])  # a network into itself
    assert [panel.axes[1].get_ylabel().partition("\n")[0] for panel in again.plot().subfigs] == [
        "relative accuracy", *(f"auroc({label})" for label in grid.detections)
    ]  # fmt: skip


def test_a_detector_that_cannot_be_fitted_to_stitched_activations_has_reasons(images: Any) -> None:
    """20 images have about half of them for the fit, too few for 16 channels."""
    a, data = made("cnn"), of(images, double=True)
    grid = hf_stitch.stitch_grid(
        a, a, data, layers_a=["layer1.0"], layers_b=["layer1.0"], detectors=["likelihood_ratio"], pooling="mean",
        test_size=20, resamples=5, progress=False,
    )  # fmt: skip
    found = grid.detections["likelihood_ratio"]
    assert np.isnan(grid.values(figure="auroc(likelihood_ratio)")).all()
    assert found.blind["layer1.0"].startswith("is undefined: ") and "17 positions, got 15" in found.blind["layer1.0"]
    assert "undefined" in str(grid)


def test_grids_with_infinite_doses_are_plotted_and_the_best_baseline_is_printed() -> None:
    dose = np.array([[[np.inf, np.nan, np.nan], [0.03, np.nan, np.nan]]])
    losses = np.array([[[3.0, 2.0, 4.0], [2.0, 1.0, 3.0]]])
    means = np.array([[9.0, 8.0, 10.0], [5.0, 4.0, 6.0]])
    grid = StitchGrid(
        {"lstsq": {"perplexity": losses, "dose(knn)": dose}}, {"mean_only": {"perplexity": means}}, {}, ("a0",),
        ("b0", "b1"), "text-generation", "none", 9,
    )  # fmt: skip
    figure = grid.plot("dose(knn)")
    assert [text.get_text() for text in figure.axes[0].texts] == ["1.00", "0.03"]
    assert figure.axes[1].get_ylabel() == "dose(knn)\nlower = better; 1: at least 1"
    assert "mean_only 5.000" in str(grid)  # the best of its layers


def test_the_corresponding_layer_is_a_hit_a_tie_or_a_miss() -> None:
    values = np.array([[0.9, 0.2, 0.1], [0.3, 0.79, 0.8], [0.2, 0.7, 0.3]])
    p_values = np.array([[1.0, 0.002, 0.002], [0.002, 0.6, 1.0], [0.002, 1.0, 0.002]])
    columns = np.array([[1.0, 0.002, 0.002], [0.002, 1.0, 1.0], [0.002, 0.03, 0.002]])
    scores = {"m": {"agreement": np.repeat(values[..., None], 3, 2)}}
    both = {"m": {"agreement": np.stack([p_values, columns])}}
    grid = StitchGrid(scores, {}, both, ("x", "y", "z"), ("x", "y", "z"), "image-classification", "none", 99)
    found = grid.identify()
    assert found.verdicts("a").tolist() == [["hit", "tie", "miss"]] and found.layers == ("x", "y", "z")
    assert found.verdicts("b").tolist() == [["hit", "hit", "miss"]]
    # .03 is above .05 / 2, but only the second smallest of its column: Holm rejects it.
    assert grid.as_good()[1, :, 1].tolist() == [False, True, False]
    assert grid.as_good(level=0.01)[1, :, 1].tolist() == [False, True, True]


def test_prefix_tokens_come_from_all_positions_of_a_larger_source() -> None:
    g = torch.Generator().manual_seed(0)
    train, test = (torch.randn(n, 3, 32, 32, generator=g) for n in (120, 40))
    net = nn.Sequential(nn.Conv2d(3, 24, 3, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(2400, CLASSES))
    a, b = hf_stitch.load(net, example_inputs=test[:2]), network("vit")
    layer = b.layers[0]
    grid = hf_stitch.stitch_grid(
        a, b, train, test_data=test, layers_a=["0"], layers_b=[layer], matchers=["procrustes"], resamples=2,
        progress=False,
    )  # fmt: skip
    assert (a.spec("0").grid, b.spec(layer).grid, b.spec(layer).prefix_tokens) == ((10, 10), (4, 4), 1)
    y = b.encode(b.preprocess(test), layer)[layer].values
    with torch.no_grad():
        apart = (grid.stitches or {})["procrustes", "0", layer](a.encode(a.preprocess(test), "0")["0"]).values - y
    expected = float(apart.double().square().sum() / y.double().square().sum())
    assert grid.score("0", layer, "structural_error").value == pytest.approx(expected, rel=1e-5)
