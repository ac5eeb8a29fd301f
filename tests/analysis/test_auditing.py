"""Audits: verdicts, their figures, and the verdicts on the networks of a paper."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.nn import functional

import hf_stitch
from hf_stitch import Adapter, Audit, Samples
from hf_stitch.matchers.fitting import collect, fit_layer
from hf_stitch.metrics import direct_matching
from hf_stitch.registry import registries
from hf_stitch.stitches import LinearStitch
from hf_stitch.workflows._stitch import join

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("HF_STITCH_SHARED", ROOT.parent / "shared"))


def with_map(place: Any, weight: torch.Tensor, bias: torch.Tensor) -> hf_stitch.StitchedModel:
    """Stitch the target to itself with the given map."""
    layer = place.stitched.stitch.with_maps(LinearStitch.of(weight=weight, bias=bias), None)
    return join(place.target, "0", layer, place.target, "0", task=place.target.task)


def audit(stitched: Any, place: Any, **options: Any) -> Audit:
    return hf_stitch.audit(stitched, place.test, **{"resamples": 200, "progress": False, **options})


@pytest.fixture(scope="module")
def direct(place: Any) -> Audit:
    """Audit of the least-squares stitching layer."""
    return audit(place.stitched, place, train_data=place.train)


def test_least_squares_is_accurate_and_in_distribution(direct: Audit, place: Any) -> None:
    assert direct.verdict == "accurate and in distribution"
    assert direct.evaluation == hf_stitch.evaluate(place.stitched, place.test, resamples=200, progress=False)
    assert direct.worst.raw.low > direct.worst.compensated.high
    assert direct.control == place.train.fingerprint


def test_the_model_card_contains_the_verdict(place: Any, tmp_path: Path) -> None:
    width = place.stitched.stitch.body.in_features
    stitched = with_map(place, torch.eye(width), torch.zeros(width))
    stitched.stitcher.save_pretrained(tmp_path)
    assert "**Audit**" not in (tmp_path / "README.md").read_text()
    found = audit(stitched, place)
    stitched.stitcher.save_pretrained(tmp_path)
    assert f"**Audit**: {found.verdict}" in (tmp_path / "README.md").read_text()


def test_the_residual_matches_direct_matching(direct: Audit, place: Any) -> None:
    images = torch.stack([s for batch in place.test.batches(400) for s in batch.samples])
    with torch.no_grad():
        mapped = place.stitched.transfer(input=images).rows("none")
        real = place.target.encode(images, "0")["0"].rows("none")
    assert direct.residual["body"] == pytest.approx(float(direct_matching(mapped.double(), real.double())), rel=1e-6)


def test_identity_is_in_distribution_scaling_is_out_and_the_mean_is_inaccurate(place: Any) -> None:
    width = place.stitched.stitch.widths[1]
    identity, mean = torch.eye(width), place.stitched.stitch.body_mean
    itself = audit(with_map(place, identity, torch.zeros(width)), place)
    assert itself.verdict == "accurate and in distribution"
    assert itself.worst.raw.value == 0.5
    assert "no control" in str(itself)
    twice = audit(with_map(place, 2 * identity, -mean), place)
    assert (twice.in_distribution, twice.worst.side) == (False, "beyond")
    half = audit(with_map(place, 0.5 * identity, 0.5 * mean), place)
    assert (half.in_distribution, half.worst.side) == (False, "shrunk")
    alone = audit(with_map(place, 0 * identity, mean), place)
    assert alone.verdict == "inaccurate, though in distribution: no sign of similarity"
    assert "out of distribution" in twice.verdict
    assert "beyond" in str(twice)


def test_sample_order_and_batch_size_do_not_matter(direct: Audit, place: Any) -> None:
    order = np.random.default_rng(0).permutation(len(place.test)).tolist()
    again = hf_stitch.audit(
        place.stitched, place.test.select(order), train_data=place.train, resamples=200, batch_size=7, progress=False
    )
    assert again.worst.raw.value == pytest.approx(direct.worst.raw.value, abs=1e-4)
    assert again.worst.compensated.value == pytest.approx(direct.worst.compensated.value, abs=1e-4)
    assert again.residual["body"] == pytest.approx(direct.residual["body"], rel=1e-5)


def test_another_pooling_is_recorded(place: Any) -> None:
    assert audit(place.stitched, place, pooling="mean").pooling == "mean"


def test_the_target_may_receive_other_samples(direct: Audit, place: Any) -> None:
    assert audit(place.stitched, place, train_data=place.train, paired_data=place.test) == direct
    order = [*range(1, len(place.test)), 0]
    images = torch.stack([image for batch in place.test.batches(400) for image in batch.samples])
    moved = Samples.of(images[order], label=place.test.labels, id=place.test.ids)
    other = audit(place.stitched, place, paired_data=moved)
    with torch.no_grad():
        mapped = place.stitched.transfer(input=images).rows("none")
        real = place.target.encode(images[order], "0")["0"].rows("none")
    assert other.evaluation == hf_stitch.evaluate(
        place.stitched, place.test, paired_data=moved, resamples=200, progress=False
    )
    assert other.residual["body"] == pytest.approx(float(direct_matching(mapped.double(), real.double())), rel=1e-6)


def test_prefix_tokens_are_audited() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
        num_labels=3, initializer_range=0.4,
    )  # fmt: skip
    vit = hf_stitch.load(transformers.ViTForImageClassification(config).eval())
    images = torch.randn(120, 3, 8, 8)
    itself = hf_stitch.stitch(
        vit, vit, images, source_layer="vit.layers.0", target_layer="vit.layers.0", matcher="identity", progress=False
    )
    found = hf_stitch.audit(itself, images, resamples=100, progress=False)
    assert list(found.distributions) == list(found.residual) == ["body", "prefix"]
    assert found.figure == "agreement"
    assert found.verdict == "accurate and in distribution"
    assert len(found.plot().axes[0].get_yticklabels()) == 6


def test_an_audit_converts_to_json_text_and_figure(direct: Audit) -> None:
    record = json.loads(json.dumps(direct.to_dict(), allow_nan=False))
    assert Audit.from_dict(record) == direct
    assert record["verdict"] == direct.verdict
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(direct)
    text = console.export_text()
    assert all(word in text for word in (direct.verdict, "compensated", str(direct.worst.raw), "mean_only"))
    assert str(direct).startswith(direct.verdict)
    names = [tick.get_text() for tick in direct.plot().axes[0].get_yticklabels()]
    assert names == ["raw", "compensated", "distance", "control"]


def test_models_and_samples_that_cannot_be_audited_are_rejected(place: Any) -> None:
    with pytest.raises(ValueError, match="min_relative_accuracy must be above 0"):
        audit(place.stitched, place, min_relative_accuracy=0)
    with pytest.raises(ValueError, match="the two sides differ first"):
        audit(place.stitched, place, paired_data=place.train)
    with pytest.raises(ValueError, match="give more samples"):
        hf_stitch.audit(place.stitched, place.test.take(2), progress=False)
    headless = join(place.source, "0", place.stitched.stitch, place.target, "0", task=None)
    with pytest.raises(ValueError, match="no head"):
        audit(headless, place)


# -- the networks of Csiszárik et al. 2021 -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny10() -> Iterator[tuple[Adapter, Adapter, Samples, Samples]]:
    """Two trained networks, 2,000 training images and 1,500 test images of CIFAR-10."""
    folder = SHARED / "models" / "drfrankenstein_tiny10"
    if not (folder.is_dir() and (SHARED / "data" / "cifar10").is_dir()):
        pytest.skip("needs the shared networks and data (HF_STITCH_SHARED)")
    sys.path.insert(0, str(ROOT / "examples" / "dr_frankenstein"))
    try:
        import networks
    finally:
        sys.path.pop(0)
    a, b = (
        hf_stitch.load(
            networks.Tiny10.from_file(folder / f"in{i}-gn{i}.safetensors"), example_inputs=torch.randn(2, 3, 32, 32)
        )
        for i in (0, 1)
    )
    read = (
        Samples.of(hf_stitch.data.read_data("uoft-cs/cifar10", data_dir=SHARED / "data", split=split)).take(n)
        for split, n in (("train", 2000), ("test", 1500))
    )
    train, test = (
        Samples.of(torch.stack([networks.normalise(i) for b in s.batches(500) for i in b.samples]), label=s.labels)
        for s in read
    )
    yield a, b, train, test


@pytest.mark.slow
def test_verdicts_on_trained_networks(tiny10: Any) -> None:
    a, b, train, test = tiny10
    pairs = [("bn1", "bn1"), ("bn8", "bn8"), ("bn8", "bn3")]
    statistics = collect(a, b, pairs, train, batch_size=200, progress=False)
    verdicts = {}
    for pair in pairs:
        layer = fit_layer(registries.matchers.build("lstsq"), statistics[pair], a.spec(pair[0]), b.spec(pair[1]))
        stitched = join(a, pair[0], layer, b, pair[1], task=b.task)
        verdicts[pair] = hf_stitch.audit(stitched, test, train_data=train, resamples=200, progress=False)
    assert verdicts["bn1", "bn1"].verdict == verdicts["bn8", "bn8"].verdict == "accurate and in distribution"
    assert verdicts["bn8", "bn3"].verdict.startswith("inaccurate")

    _train_on_the_task(stitched, train)
    found = hf_stitch.audit(stitched, test, train_data=train, resamples=200, progress=False)
    assert found.verdict == "accurate but out of distribution: do not read this as similarity"
    assert found.residual["body"] > 0.9


def _train_on_the_task(stitched: hf_stitch.StitchedModel, train: Samples) -> None:
    """300 steps of Adam on the stitch, hard labels."""
    images = torch.stack([s for batch in train.batches(500) for s in batch.samples])
    labels = torch.tensor(train.labels)
    with torch.no_grad():
        codes = torch.cat([stitched.source(x=part).values for part in images.split(200)])
    stitched.target.requires_grad_(False)
    optimiser = torch.optim.Adam(stitched.stitch.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        chosen = torch.randint(len(codes), (64,), generator=generator)
        logits = stitched.head(stitched.stitch(hf_stitch.Representation(codes[chosen], "bchw"))).logits
        optimiser.zero_grad()
        functional.cross_entropy(logits, labels[chosen]).backward()
        optimiser.step()
