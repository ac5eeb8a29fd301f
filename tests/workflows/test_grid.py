"""Grids of stitches have the scores of stitches made one by one, and resume to the same bits."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

import hf_stitch
from hf_stitch.analysis.grid.detection import Watch, auroc, equivalent_dose
from hf_stitch.analysis.grid.figures import differences_from_best
from hf_stitch.analysis.grid.result import StitchGrid
from hf_stitch.representation import Representation
from hf_stitch.training import TaskLoss

from killing import killed_at_every_operation  # isort: skip
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
    rows = [{**row, "image": row["image"].double()} for row in data] if double else data
    return hf_stitch.Samples.of(rows)


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
    layers = {"layers_a": LAYERS[first], "layers_b": LAYERS[second]}
    grid = hf_stitch.stitch_grid(a, b, data, matchers=chosen, resamples=20, **layers, **options)
    for matcher in chosen:
        for la in LAYERS[first]:
            for lb in LAYERS[second]:
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


def test_a_network_into_itself_is_perfect_on_the_diagonal(images: Any) -> None:
    net = made("cnn")
    grid = hf_stitch.stitch_grid(
        net, net, of(images, double=True), layers_a=LAYERS["cnn"], layers_b=LAYERS["cnn"], progress=False
    )
    assert np.allclose(np.diag(grid.values(figure="structural_error")), 0, atol=1e-9)
    assert np.diag(grid.values(figure="agreement")).tolist() == [1.0] * 3


def test_each_network_runs_once_per_batch(images: Any) -> None:
    a, b, data = made("cnn"), made("vit", 1), of(images, double=True)
    layers = {"layers_a": LAYERS["cnn"], "layers_b": LAYERS["vit"]}
    _ = a.layers, b.layers
    counts = {"a": 0, "b": 0}

    def count(side: str) -> Any:
        def add(*_: Any) -> None:
            counts[side] += 1

        return add

    first = next(module for module in a.model.modules() if isinstance(module, nn.Conv2d))
    second = b.model.get_submodule("vit.layers.0.layernorm_before")
    hooks = [first.register_forward_hook(count("a")), second.register_forward_hook(count("b"))]
    hf_stitch.stitch_grid(a, b, data.take(64), test_data=data.take(16), batch_size=16, progress=False, **layers)
    for hook in hooks:
        hook.remove()
    once = 4 + 1 + 1  # batches for the fit, one for the scores, one sample before them
    assert counts["a"] <= once + 1 and counts["b"] <= once + 2  # and one for the number of classes


def test_trained_stitches_are_those_of_stitch(images: Any) -> None:
    a, b, data = made("cnn"), made("cnn", 1), of(images, double=True)
    matcher = TaskLoss(max_steps=3, batch_size=16)
    layers = {"layers_a": ["layer1.0", "layer2.0"], "layers_b": ["layer2.0"]}
    grid = hf_stitch.stitch_grid(a, b, data, matchers=["lstsq", matcher], progress=False, **layers)
    assert grid.matchers == ("lstsq", matcher.label)
    one = hf_stitch.stitch(
        a, b, data, source_layer="layer1.0", target_layer="layer2.0", matcher=matcher, progress=False
    )
    got = grid.stitched("layer1.0", "layer2.0", matcher.label).stitch
    torch.testing.assert_close(got.body.weight, one.stitch.body.weight, rtol=1e-4, atol=1e-5)


def test_a_plan_counts_what_the_grid_does(images: Any) -> None:
    a, b, images = made("cnn"), made("cnn", 1), of(images, double=True)
    closed = hf_stitch.stitch_grid(a, b, images, matchers=["lstsq", "procrustes"], plan=True)
    pairs = len(a.layers) * len(b.layers)
    assert closed.stitches == 2 * pairs and closed.training == closed.disk == 0
    training = TaskLoss(labels="target", max_steps=7, batch_size=16)
    trained = hf_stitch.stitch_grid(a, b, images, matchers=["lstsq", training], test_size=0.5, plan=True)
    one = next(iter(images.take(1).batches(1))).samples
    sizes = [activations.values.nbytes for activations in a.encode(a.preprocess(one), a.layers).values()]
    assert trained.disk == len(images) // 2 * sum(sizes)
    assert trained.training > 0 < trained.fitting < trained.seconds
    assert "detectors are not included" in " ".join(str(trained).split()) and trained.to_pandas().shape == (4, 2)


def test_undefined_stitches_have_reasons_and_are_left_out(images: Any) -> None:
    """20 samples are too few for 24 and 32 channels."""
    a, b, data = made("cnn"), made("cnn", 1), of(images, double=True)
    options: dict[str, Any] = {"test_data": data.select(range(20, 80)), "pooling": "mean", "progress": False}
    few, layers = data.take(20), LAYERS["cnn"]
    grid = hf_stitch.stitch_grid(a, b, few, layers_a=layers, layers_b=layers, matchers=["lstsq", "ridge"], **options)
    assert np.isnan(grid["lstsq"]).tolist() == [[False] * 3, [True] * 3, [True] * 3]
    assert not np.isnan(grid["ridge"]).any() and len(grid.undefined) == 6
    with pytest.raises(ValueError, match=r"lstsq: layer2.0 -> layer1.0 is undefined: .*needs at least 25 rows, got 20"):
        grid.stitched("layer2.0", "layer1.0", "lstsq")
    assert str(grid).count("undefined") == 2
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


def test_a_grid_is_saved_plotted_and_exported(images: Any, tmp_path: Any) -> None:
    a, b, data = made("cnn"), made("cnn", 1), of(images, double=True)
    grid = hf_stitch.stitch_grid(
        a, b, data, layers_a=LAYERS["cnn"], layers_b=["layer2.0"], resamples=20, progress=False
    )
    grid.save(tmp_path / "grid.json")
    loaded = StitchGrid.load(tmp_path / "grid.json")
    assert str(loaded) == str(grid) and loaded.to_pandas().equals(grid.to_pandas())
    with pytest.raises(ValueError, match="loaded from a file"):
        loaded.stitched("layer1.0", "layer2.0")
    assert len(grid.to_pandas()) == 3 * len(grid.figures)
    assert grid.plot().axes
    with pytest.raises(KeyError, match="no layer 'nosuch' of a"):
        grid.score("nosuch", "layer2.0")
    with pytest.raises(KeyError, match="no matcher 'ridge'"):
        grid["ridge"]


def test_bad_arguments_are_named_before_any_work(images: Any) -> None:
    net, data = made("cnn"), of(images, double=True)
    with pytest.raises(TypeError, match="matchers must be a list"):
        hf_stitch.stitch_grid(net, net, data, matchers="lstsq")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="each method once"):
        hf_stitch.stitch_grid(net, net, data, matchers=["lstsq", "lstsq"])
    wrong = hf_stitch.Samples.of([{"image": row["image"].double(), "label": CLASSES} for row in images])
    with pytest.raises(ValueError, match="target predicts classes"):
        hf_stitch.stitch_grid(net, net, wrong, layers_a=["layer1.0"], layers_b=["layer1.0"])


def test_unlabelled_samples_are_scored_by_agreement() -> None:
    net = made("cnn")
    grid = hf_stitch.stitch_grid(
        net, made("cnn", 1), torch.randn(60, 3, 32, 32, dtype=torch.float64), layers_a=["layer1.0"],
        layers_b=["layer1.0"], resamples=10, progress=False,
    )  # fmt: skip
    assert grid.figures == ("agreement", "structural_error")


def test_p_values_are_small_for_clear_differences_and_large_for_ties() -> None:
    random = np.random.default_rng(0)
    noise = random.normal(0, 0.01, (1001, 1, 1))
    drawn = np.array([[0.9, 0.9, 0.2]]) + noise * np.array([[1.0, -1.0, 1.0]])
    drawn[0] = [[0.9, 0.899, 0.2]]
    rows, columns = differences_from_best(drawn, "agreement")
    assert rows[0, 0] == 1.0 and rows[0, 1] > 0.5 and rows[0, 2] < 0.01
    assert (columns == 1.0).all()  # each is alone in its column


def test_detectors_tell_what_is_strange_and_how_strange(images: Any) -> None:
    """A network into itself is in distribution; permuted channels are not; noise scores like noise."""
    a, data = made("cnn"), of(images, double=True)
    layers: dict[str, Any] = {"layers_a": ["layer1.0"], "layers_b": ["layer1.0", "layer2.0"]}
    far = hf_stitch.Samples.of(torch.rand(40, 3, 32, 32, dtype=torch.float64) * 20, label=[0] * 40)
    grid = hf_stitch.stitch_grid(
        a, a, data, matchers=["identity", "random"], detectors=["mahalanobis", "knn:k=3"], far_data=far,
        progress=False, **layers,
    )  # fmt: skip
    for label in ("mahalanobis", "knn(k=3)"):
        own = grid.score("layer1.0", "layer1.0", f"auroc({label})", "identity")
        assert own.value == 0.5 and own.low == own.high == 0.5
        assert grid.score("layer1.0", "layer1.0", f"dose({label})", "identity").value == 0
        weakest, strongest = grid.doses[label][:, 0, 0], grid.doses[label][:, -1, 0]
        assert (weakest < strongest - 0.1).all() and (strongest > 0.8).all()
        assert (grid.far[label][:, 0] > 0.95).all()
    assert grid.score("layer1.0", "layer1.0", "auroc(mahalanobis)", "random").value > 0.9
    assert StitchGrid.from_dict(grid.to_dict()).to_pandas().equals(grid.to_pandas())


def test_auroc_is_that_of_scikit_learn_with_the_interval_of_the_bootstrap() -> None:
    g = np.random.default_rng(0)
    negative = g.normal(size=300)
    positive = negative * 0.8 + g.normal(0.7, 0.6, 300)
    labels = [1] * 300 + [0] * 300
    value, low, high = auroc(positive, negative)
    assert value == pytest.approx(roc_auc_score(labels, np.concatenate([positive, negative])))
    drawn = []
    for _ in range(400):
        rows = g.integers(0, 300, 300)
        drawn.append(roc_auc_score(labels, np.concatenate([positive[rows], negative[rows]])))
    np.testing.assert_allclose([low, high], np.quantile(drawn, [0.025, 0.975]), atol=0.01)
    apart = auroc(positive, negative[:200], paired=False)
    assert apart[0] == pytest.approx(roc_auc_score(labels[:500], np.concatenate([positive, negative[:200]])))
    assert apart[2] - apart[1] > high - low  # pairs are correlated


def test_equivalent_doses_are_interpolated() -> None:
    doses = np.array([0.5, 0.6, 0.7, 0.8, 0.9])
    found = equivalent_dose(np.array([0.4, 0.6, 0.65, 0.9, 0.95]), doses)
    np.testing.assert_allclose(found, [0, 0.03, (0.03 * 0.1) ** 0.5, 1.0, np.inf])


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


def test_a_stitched_model_of_a_grid_does_not_share_its_map(images: Any) -> None:
    a, b, data = made("cnn"), made("cnn", 1), of(images, double=True)
    layers: dict[str, Any] = {"layers_a": ["layer1.0"], "layers_b": ["layer1.0"]}
    grid = hf_stitch.stitch_grid(a, b, data, resamples=5, progress=False, **layers)
    before = grid.stitched("layer1.0", "layer1.0").stitch.state_dict()
    grid.stitched("layer1.0", "layer1.0").half()
    after = grid.stitched("layer1.0", "layer1.0").stitch.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_noise_has_the_size_and_the_covariance_that_it_claims() -> None:
    g = torch.Generator().manual_seed(0)
    mixed = torch.randn(4, 4, generator=g)
    values = torch.einsum("bchw,cd->bdhw", torch.randn(400, 4, 5, 5, generator=g), mixed) + 1
    own = Representation(values, "bchw")
    watch = Watch.of(hf_stitch.registries.detectors.build("mahalanobis"), [own])
    noise = watch.noise(own, [(0, place) for place in range(400)])
    assert noise.square().sum() / values.square().sum() == pytest.approx(1, rel=0.05)
    expected, found = (part.transpose(0, 1).flatten(1).cov() for part in (values, noise))
    torch.testing.assert_close(found / found.trace(), expected / expected.trace(), atol=0.02, rtol=0)
    with pytest.raises(ValueError, match="all 9 positions are equal"):
        Watch.of(hf_stitch.registries.detectors.build("knn:k=1"), [Representation(torch.ones(9, 4), "bd")])


def test_noise_of_a_sample_depends_neither_on_its_batch_nor_on_padding() -> None:
    g = torch.Generator().manual_seed(0)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[0, 4:] = mask[1, 1:3] = False  # on the right of one text, on the left of another, after one prefix token
    own = Representation(torch.randn(3, 6, 5, generator=g), "bnd", mask=mask, prefix_tokens=1)
    watch = Watch.of(hf_stitch.registries.detectors.build("knn:k=1"), [own])
    seeds = [(7, place) for place in range(3)]
    noise = watch.noise(own, seeds)
    assert not noise[:, 0].any() and not noise[~mask].any() and noise[:, 1:][mask[:, 1:]].all()
    first = own.replace(values=own.values[:1, :4], mask=mask[:1, :4])
    second = own.replace(values=own.values[1:2, [0, 3, 4, 5]], mask=mask[1:2, [0, 3, 4, 5]])
    torch.testing.assert_close(watch.noise(first, seeds[:1]), noise[:1, :4])
    torch.testing.assert_close(watch.noise(second, seeds[1:2]), noise[1:2, [0, 3, 4, 5]])


def test_the_corresponding_layer_is_a_hit_a_tie_or_a_miss() -> None:
    values = np.array([[0.9, 0.2, 0.1], [0.3, 0.79, 0.8], [0.2, 0.7, 0.3]])
    p_values = np.array([[1.0, 0.002, 0.002], [0.002, 0.6, 1.0], [0.002, 1.0, 0.002]])
    columns = np.array([[1.0, 0.002, 0.002], [0.002, 1.0, 1.0], [0.002, 0.03, 0.002]])
    scores = {"m": {"agreement": np.repeat(values[..., None], 3, 2)}}
    both = {"m": {"agreement": np.stack([p_values, columns])}}
    grid = StitchGrid(scores, {}, both, ("x", "y", "z"), ("x", "y", "z"), "image-classification", "none", 99)
    assert grid.identify() == {"a": ("hit", "tie", "miss"), "b": ("hit", "hit", "miss")}
    # .03 is above .05 / 2, but only the second smallest of its column: Holm rejects it.
    assert grid.as_good()[1, :, 1].tolist() == [False, True, False]
    assert grid.as_good(level=0.01)[1, :, 1].tolist() == [False, True, True]


def job(folder: Any, images: Any) -> StitchGrid:
    a, b = made("cnn"), made("cnn", 1)
    return hf_stitch.stitch_grid(
        a, b, of(images, double=True), layers_a=["layer1.0", "layer2.0"], layers_b=["layer2.0"],
        matchers=["lstsq", TaskLoss(max_steps=2, batch_size=16)], batch_size=16, checkpoint_dir=folder, resamples=20,
        detectors=["mahalanobis"], progress=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_grid_killed_at_any_operation_resumes_to_the_same_bits(images: Any, tmp_path: Any) -> None:
    torch.set_num_threads(1)
    whole = job(tmp_path / "whole", images)
    kills = 0
    for _ in killed_at_every_operation(lambda: job(tmp_path / "killed", images), step=2):
        assert job(tmp_path / "killed", images).to_dict() == whole.to_dict()
        kills += 1
        shutil.rmtree(tmp_path / "killed")
    assert kills >= 20


def test_an_interrupted_grid_resumes_to_the_same_bits(
    images: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_stitch.analysis.grid.measuring import Measures
    from hf_stitch.storage.checkpoint import Checkpoint

    monkeypatch.setattr(Checkpoint, "due", lambda self, done: self.lasting)
    whole = job(tmp_path / "whole", images)
    original, left = Measures._measure, [1]

    def interrupted(self: Measures, batch: Any, start: int) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return original(self, batch, start)

    # 64 samples are fitted to and 16 scored: one batch.
    monkeypatch.setattr(Measures, "_measure", interrupted)
    left[0] = 0
    with pytest.raises(KeyboardInterrupt):
        job(tmp_path / "stopped", images)
    monkeypatch.setattr(Measures, "_measure", original)
    assert job(tmp_path / "stopped", images).to_dict() == whole.to_dict()
    assert job(tmp_path / "stopped", images).to_dict() == whole.to_dict()  # finished: nothing is left to do
