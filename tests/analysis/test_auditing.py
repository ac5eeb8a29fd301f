"""Audits: verdicts, their figures, and the verdicts on the networks of a paper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console

import hf_stitch
from hf_stitch import Adapter, Samples
from hf_stitch.analysis import Audit, Detection, Evaluation, Score
from hf_stitch.artefacts.joining import join
from hf_stitch.metrics import direct_matching
from hf_stitch.registry import registries
from hf_stitch.stitches import LinearStitch

from tiny_networks import network as tiny, stitched as stitched_at  # isort: skip

WIDTH = 8
NOT_FOUND = "accurate, and no detector finds it out of distribution"
FAR = torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 4


def with_map(place: Any, weight: torch.Tensor, bias: torch.Tensor) -> hf_stitch.StitchedModel:
    """Stitch the target to itself with the given map."""
    layer = place.stitched.stitch.with_maps(LinearStitch.of(weight=weight, bias=bias), None)
    return join(place.target, "0", layer, place.target, "0", task=place.target.task)


def audit(stitched: Any, place: Any, **options: Any) -> Audit:
    return hf_stitch.audit(stitched, place.test, **{"resamples": 200, "progress": False, **options})


@pytest.fixture(scope="module")
def direct(place: Any) -> Audit:
    return audit(place.stitched, place, train_data=place.train, far_data=FAR)


def test_least_squares_is_accurate_in_distribution_and_shrunk(direct: Audit, place: Any) -> None:
    assert direct.verdict.startswith(NOT_FOUND)
    assert direct.is_shrunk and "(it is shrunk, which hides strange activations)" in str(direct)
    expected = hf_stitch.evaluate(place.stitched, place.test, resamples=200, progress=False)
    assert {who: row for who, row in expected.scores.items() if who != "identity"} == direct.evaluation.scores
    assert direct.known == place.train.fingerprint


@pytest.mark.parametrize(
    ("task", "own", "rival", "accurate"),
    [
        ("image-classification", Score(0.95, 0.90, 1.00), 0.85, True),
        ("image-classification", Score(0.95, 0.80, 1.00), 0.85, False),
        ("image-classification", Score(0.85, 0.80, 0.90), 0.20, False),
        ("text-generation", Score(1.05, 1.00, 1.10), 1.20, True),
        ("text-generation", Score(1.05, 1.00, 1.30), 1.20, False),
        ("text-generation", Score(1.30, 1.25, 1.35), 9.00, False),
    ],
)
def test_accurate_is_near_the_target_and_its_interval_beyond_all_baselines(
    task: str, own: Score, rival: float, accurate: bool
) -> None:
    figure = registries.tasks.get(task).compared[0]
    for best in ("mean_only", "chance"):
        worst = 0.0 if task == "image-classification" else 99.0
        rivals = {"mean_only": worst, "chance": worst, best: rival}
        scores = {"stitched": {figure: own}, **{name: {figure: Score(v, v, v)} for name, v in rivals.items()}}
        found = Audit(Evaluation(task, 100, "sha256:0", scores), 0.9, 0.2, "none", {"body": 0.1}, {}, "sha256:0", 0)
        assert found.is_accurate is accurate


def test_the_model_card_contains_the_verdict(place: Any, tmp_path: Path) -> None:
    stitched = with_map(place, torch.eye(WIDTH), torch.zeros(WIDTH))
    stitched.stitcher.save_pretrained(tmp_path)
    assert "**Audit**" not in (tmp_path / "README.md").read_text()
    found = audit(stitched, place)
    stitched.stitcher.save_pretrained(tmp_path)
    assert f"**Audit**: {found.verdict}" in (tmp_path / "README.md").read_text()


def test_identity_and_shrinkage_are_in_distribution_scaling_is_out_and_the_mean_is_inaccurate(place: Any) -> None:
    identity, mean = torch.eye(WIDTH), place.stitched.stitch.body_mean
    itself, twice, half, alone = audit(
        [
            with_map(place, identity, torch.zeros(WIDTH)), with_map(place, 2 * identity, -mean),
            with_map(place, 0.5 * identity, 0.5 * mean), with_map(place, 0 * identity, mean),
        ],
        place, train_data=place.train, far_data=FAR,
    )  # fmt: skip
    assert itself.verdict.startswith(NOT_FOUND) and not itself.is_shrunk
    assert all(dose == Score(0.0, 0.0, 0.0) for dose in itself.doses.values())
    assert twice.in_distribution is False and twice.doses["mahalanobis"].low > 0.1
    assert half.in_distribution and half.is_shrunk
    assert alone.verdict.startswith("inaccurate, though no detector finds it out of distribution")


def test_the_smaller_a_residual_the_smaller_the_dose_and_nothing_is_warned_of_below_the_threshold(place: Any) -> None:
    g = torch.Generator().manual_seed(0)
    turned = torch.randn(WIDTH, WIDTH, generator=g)
    models = [with_map(place, torch.eye(WIDTH) + size * turned, torch.zeros(WIDTH)) for size in (0.02, 0.1, 0.4, 2.0)]
    found = audit(models, place, train_data=place.train, far_data=FAR)
    doses = [one.doses["mahalanobis"].value for one in found]
    assert doses == sorted(doses) and found[0].residual["body"] < 0.005
    assert found[0].verdict.startswith(NOT_FOUND)
    assert found[-1].in_distribution is False
    lenient = audit(models, place, train_data=place.train, far_data=FAR, max_dose=1e9)
    assert not any("do not read" in one.verdict for one in lenient)


def test_several_models_are_audited_as_each_alone_and_the_target_runs_once(place: Any, direct: Audit) -> None:
    identity = with_map(place, torch.eye(WIDTH), torch.zeros(WIDTH))
    calls, original = [0], Adapter.run_with_callback

    def counted(self: Adapter, *given: Any, **options: Any) -> Any:
        calls[0] += self is place.target
        return original(self, *given, **options)

    options: dict[str, Any] = {"train_data": place.train, "far_data": FAR, "batch_size": 100}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adapter, "run_with_callback", counted)
        both = audit([place.stitched, identity], place, **options)
    # 4 batches of test samples; encode runs 8 of the training samples, 1 of far ones, and one batch for sizes
    assert calls[0] == 4 + 8 + 1 + 1
    alone = [audit(place.stitched, place, **options), audit(identity, place, **options)]
    assert [one.to_dict() for one in both] == [one.to_dict() for one in alone]
    assert both[0].verdict == direct.verdict


def test_sample_order_and_batch_size_do_not_matter(direct: Audit, place: Any) -> None:
    order = np.random.default_rng(0).permutation(len(place.test)).tolist()
    again = hf_stitch.audit(
        place.stitched, place.test.select(order), train_data=place.train.select(range(799, -1, -1)), far_data=FAR,
        resamples=200, batch_size=7, progress=False,
    )  # fmt: skip
    before, after = (found.to_pandas().set_index(["detector", "figure"])["value"] for found in (direct, again))
    chosen = after.index[~after.index.get_level_values("figure").isin(["aupr", "fpr95"])]
    np.testing.assert_allclose(after[chosen], before[chosen], atol=1e-4)
    assert again.residual["body"] == pytest.approx(direct.residual["body"], rel=1e-5)


def test_without_training_samples_one_half_is_scored(place: Any) -> None:
    found = audit(place.stitched, place)
    assert found.verdict.startswith(NOT_FOUND) and found.evaluation.n == 400
    assert found.known != place.test.fingerprint
    assert "without far_data" in str(found)


def test_detectors_are_taken_by_name_also_those_that_learn_from_stitched_activations(place: Any) -> None:
    detectors = ["likelihood_ratio", "knn:k=5"]
    found = audit(place.stitched, place, detectors=detectors, train_data=place.train, far_data=FAR)
    assert list(found.doses) == ["likelihood_ratio", "knn(k=5)"]
    assert found.in_distribution is False  # it learns to tell shrunk activations, which are not higher ones to it


def test_a_detector_that_does_not_tell_far_samples_apart_does_not_count(place: Any) -> None:
    twice = with_map(place, 2 * torch.eye(WIDTH), torch.zeros(WIDTH))
    g = torch.Generator().manual_seed(0)
    patterns = torch.randn(4, 3, 8, 8, generator=g)  # those of the data
    alike = 0.35 * patterns.repeat(50, 1, 1, 1) + torch.randn(200, 3, 8, 8, generator=g.manual_seed(5))
    found = audit(twice, place, train_data=place.train, far_data=alike)
    assert found.in_distribution is None and not found.doses
    assert found.left_out.keys() == {"mahalanobis", "knn"}
    assert all(why.startswith("distinguishes far samples with an AUROC of only 0.") for why in found.left_out.values())
    assert "no detector counts (mahalanobis distinguishes far samples with" in found.verdict
    assert "do not read" not in found.verdict


def test_the_target_may_receive_other_samples(direct: Audit, place: Any) -> None:
    options: dict[str, Any] = {"train_data": place.train, "far_data": FAR}
    assert audit(place.stitched, place, paired_data=place.test, **options).to_dict() == direct.to_dict()
    order = [*range(1, len(place.test)), 0]
    images = torch.stack([image for batch in place.test.batches(400) for image in batch.samples])
    moved = Samples.of(images[order], label=place.test.labels, id=place.test.ids)
    other = audit(place.stitched, place, paired_data=moved, **options)
    with torch.no_grad():
        mapped = place.stitched.transfer(input=images).rows("none")
        real = place.target.encode(images[order], "0")["0"].rows("none")
    expected = hf_stitch.evaluate(place.stitched, place.test, paired_data=moved, resamples=200, progress=False)
    assert other.evaluation["agreement"] == expected["agreement"]
    assert other.residual["body"] == pytest.approx(float(direct_matching(mapped.double(), real.double())), rel=1e-6)


def test_prefix_tokens_are_audited() -> None:
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
        num_labels=3, initializer_range=0.4,
    )  # fmt: skip
    vit = hf_stitch.load(transformers.ViTForImageClassification(config).eval())
    images, layers = torch.randn(120, 3, 8, 8), ("vit.layers.0", "vit.layers.0")
    itself, shifted = (stitched_at(vit, vit, images, layers, matcher="identity") for _ in range(2))
    body = shifted.stitch.body
    shifted.stitch = shifted.stitch.with_maps(body, LinearStitch.of(weight=3 * torch.eye(8), bias=torch.zeros(8)))
    found, other = hf_stitch.audit([itself, shifted], images, resamples=100, progress=False)
    assert list(found.detections) == list(found.residual) == ["body", "prefix"]
    assert found.figure == "agreement" and found.residual["prefix"] < 1e-9
    assert found.verdict.startswith(NOT_FOUND)
    assert set(found.doses) == {f"{name} ({part})" for name in ("mahalanobis", "knn") for part in ("body", "prefix")}
    assert other.doses["mahalanobis (body)"].value == 0 and other.doses["mahalanobis (prefix)"].low > 0.1


def test_padded_texts_are_audited(texts: Any) -> None:
    train, test = Samples.of(texts).split(0.5, 0)
    stitched = stitched_at(tiny("bert", 0), tiny("bert", 1), train, ("bert.encoder.layer.0", "bert.encoder.layer.0"))
    options: dict[str, Any] = {"train_data": train, "resamples": 50, "progress": False}
    found = hf_stitch.audit(stitched, test, **options)
    assert found.residual["body"] > 0 and set(found.detections["body"]) == {"mahalanobis", "knn"}
    again = hf_stitch.audit(stitched, test, batch_size=3, **options)  # other padding
    assert again.residual["body"] == pytest.approx(found.residual["body"], rel=1e-4)


def test_an_audit_converts_to_text_figure_and_pandas(direct: Audit) -> None:
    assert direct.to_dict()["verdict"] == direct.verdict and str(direct).startswith(direct.verdict)
    console = Console(width=160)
    with console.capture() as shown:
        console.print(direct)
    assert all(word in shown.get() for word in ("mahalanobis", str(direct.doses["knn"]), "far", "mean_only"))
    names = [tick.get_text() for tick in direct.plot().axes[0].get_yticklabels()]
    assert names[:2] == ["mahalanobis: stitched", "mahalanobis: noise 0.01"] and "knn: far" in names
    assert {"dose", "aupr", "halves", "coloured 0.3"} <= set(direct.to_pandas()["figure"])


def test_samples_of_another_size_are_named(images: Any, net: Any) -> None:
    samples, small = Samples.of(images), torch.randn(20, 3, 24, 24)
    grids = {"detectors": ["knn:k=2"], "layers_a": ["layer2.0"], "layers_b": ["layer2.0"], "resamples": 2}
    for family, layer, message in (
        ("cnn", "layer2.0", r"equal sizes, but .* for sample 0 of {} and"),
        ("vit", "vit.layers.1", r"ViTForImageClassification cannot run on {} \(.*pass samples of the form"),
    ):
        target = net(family)
        layers = {"source_layer": layer, "target_layer": layer}
        model = hf_stitch.stitch(target, target, samples, **layers, matcher="identity", progress=False)
        grid = {**grids, "layers_a": [layer], "layers_b": [layer]}
        with pytest.raises(ValueError, match=message.format("far_data")):
            hf_stitch.audit(model, samples, far_data=small, detectors=["knn:k=2"], progress=False)
        with pytest.raises(ValueError, match=message.format("far_data")):
            hf_stitch.stitch_grid(target, target, samples, far_data=small, progress=False, **grid)
        with pytest.raises(ValueError, match=message.format("auxiliary_data")):
            options = {**grid, "detectors": ["energy"]}
            hf_stitch.stitch_grid(target, target, samples, auxiliary_data=small, progress=False, **options)
    with pytest.raises(ValueError, match="cannot run on the data that detectors are fitted to"):
        hf_stitch.audit(model, samples, train_data=small, detectors=["knn:k=2"], progress=False)


REFUSALS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda p: audit(p.stitched, p, min_relative_accuracy=0), "min_relative_accuracy must be .* > 0 and <= 1, got 0"),
    (lambda p: audit(p.stitched, p, max_dose=-1), "max_dose must be .* >= 0, got -1"),
    (lambda p: audit(p.stitched, p, detectors=["energy"]), "detector energy requires samples of other data"),
    (lambda p: audit(p.stitched, p, detectors="knn"), "detectors must be a list"),
    (lambda p: audit(p.stitched, p, train_data=p.train, far_data=p.train), r"from the data, but shares 100\.0%"),
    (lambda p: audit(p.stitched, p, train_data=p.train, far_data=p.test), r"from the data, but shares 100\.0%"),
    (lambda p: audit(p.stitched, p, paired_data=p.train), "the sides first differ"),
    (lambda p: hf_stitch.audit(p.stitched, p.test.take(6)), "knn at layer '0' .* at least 10 samples, got 3"),
    (lambda p: hf_stitch.audit(p.stitched, p.test.take(1)), "one half of the samples, got 1"),
    (lambda p: audit([], p), "stitched must contain at least one model"),
    (lambda p: audit(join(p.source, "0", p.stitched.stitch, p.target, "0", task=None), p), "without a head"),
    (
        lambda p: audit([p.stitched, join(p.target, "0", p.stitched.stitch, p.source, "0", task=p.source.task)], p),
        "model 1 differs from model 0",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_what_cannot_be_audited_is_refused(call: Callable[[Any], Any], message: str, place: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call(place)


@pytest.mark.parametrize(("accuracy", "first"), [(0.8, "accurate, and"), (0.2, "inaccurate, though")])
def test_no_verdict_promises_more_than_the_detectors_can_tell(accuracy: float, first: str) -> None:
    rows = {"stitched": accuracy, "mean_only": 0.1, "target": 0.9, "chance": 0.1}
    scores = {who: {"relative_accuracy": Score(value, value - 0.02, value + 0.02)} for who, value in rows.items()}

    def verdict(one_sided: float) -> str:
        figures = {"stitched": {"dose": np.array([[[0.02, 0.0, 0.04]]]), "one_sided": np.full((1, 1, 3), one_sided)}}
        found = {"body": {"knn": Detection("knn", ("bn1",), True, figures, {}, {"far": np.full((1, 3), 0.9)})}}
        return Audit(
            Evaluation("image-classification", 1000, "sha256:0", scores), 0.8, 0.1, "none", {"body": 0.2}, found, "x", 0
        ).verdict

    for text in (verdict(0.5), verdict(0.1)):
        assert text.startswith(f"{first} no detector finds it out of distribution")
        assert "in distribution" not in text
    assert "it is shrunk, which hides strange activations" in verdict(0.1) and "shrunk" not in verdict(0.5)
