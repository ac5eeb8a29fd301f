"""Anchors: selection, representations by encoders, and checks against mixing them up."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_stitch_testing import Part, check_selection
from hypothesis import given, strategies as st
from PIL import Image
from torch import nn

import hf_stitch
from hf_stitch.data import Samples
from hf_stitch.reference import ModelReference, Settings
from hf_stitch.registry import registries
from hf_stitch.relative import AnchorSet, RelativeProjection, select_anchors
from hf_stitch.relative.selection import Bootstrap

DATA = Samples.of(torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), label=[0] * 40 + [1] * 20)
ROWS = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))


def encoder(seed: int = 0) -> hf_stitch.Adapter:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh())
    return hf_stitch.load(net, example_inputs=torch.randn(2, 4))


# -- selection


def test_random_does_not_depend_on_the_order_of_the_samples() -> None:
    assert select_anchors(DATA, 12).ids == select_anchors(DATA.select(torch.randperm(60).tolist()), 12).ids
    assert select_anchors(DATA, 12).ids != select_anchors(DATA, 12, seed=1).ids
    assert select_anchors(DATA, 20).ids[:12] == select_anchors(DATA, 12).ids


@pytest.mark.parametrize("name", ["random", "stratified", "farthest_point", "kmeans"])
def test_another_seed_selects_others(name: str) -> None:
    first, again, other = (select_anchors(DATA, 8, name, features=ROWS, seed=seed).ids for seed in (0, 0, 1))
    assert first == again and {*first} != {*other}


@given(st.integers(1, 60), st.integers(0, 5))
def test_stratified_anchors_have_the_classes_in_proportion(count: int, seed: int) -> None:
    labels = select_anchors(DATA, count, "stratified", seed=seed).labels
    assert len(labels) == count
    assert abs(labels.count(0) - count * 2 / 3) < 1


def test_farthest_points_are_the_greedy_choice() -> None:
    chosen = [DATA.ids.index(id_) for id_ in select_anchors(DATA, 8, "farthest_point", features=ROWS).ids]
    for step in range(1, 8):
        assert int(torch.cdist(ROWS, ROWS[chosen[:step]]).min(1).values.argmax()) == chosen[step]


def test_kmeans_finds_one_sample_in_each_cluster_nearest_to_its_centre() -> None:
    centres = 100 * torch.eye(4)
    which = torch.arange(60) % 4
    features = centres[which] + torch.randn(60, 4, generator=torch.Generator().manual_seed(2))
    chosen = list(select_anchors(DATA, 4, "kmeans", features=features).ids)
    assert sorted(which[chosen].tolist()) == [0, 1, 2, 3]
    for place in chosen:
        members = (which == which[place]).nonzero()[:, 0]
        assert int(members[(features[members] - features[members].mean(0)).norm(dim=1).argmin()]) == place


def test_frequent_samples_come_first() -> None:
    words = Samples.of(["the", "of", "cat", "and"], id=["the", "of", "cat", "and"])
    counts = {"the": 9, "of": 7, "cat": 1, "and": 7}
    assert select_anchors(words, 3, "frequency", counts=counts).ids == ("the", "of", "and")


def test_parallel_anchors_are_the_given_ones_in_the_given_order() -> None:
    english = Samples.of(["cat", "dog", "cow"], id=["c", "d", "w"])
    french = Samples.of(["vache", "chat", "chien"], id=["w", "c", "d"])
    one, other = (AnchorSet.of(select_anchors(side, 2, "parallel", ids=["d", "w"])) for side in (english, french))
    one.check_parallel(other)
    assert one.fingerprint != other.fingerprint
    swapped = AnchorSet.of(select_anchors(french, 2, "parallel", ids=["w", "d"]))
    with pytest.raises(ValueError, match=r"not parallel: .* index 0: id 'd' and id 'w'.*a different order"):
        one.check_parallel(swapped)


SELECTIONS = [
    part
    for name in registries.anchors.names()
    if name not in ("bootstrap", "frequency", "ood", "parallel")
    for part in check_selection.parts(name)
]


@pytest.mark.parametrize("check", SELECTIONS, ids=str)
def test_selections_that_need_no_other_data_conform(check: Part) -> None:
    check()


@pytest.mark.parametrize("seeds", [3, 8])
def test_bootstrap_recovers_a_planted_correspondence_from_few_seeds(seeds: int) -> None:
    """One side is the other turned, scaled, shifted and blurred, in another order; three seeds alone find 60%."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 24, generator=draw, dtype=torch.float64) * torch.linspace(2, 0.3, 24)
    turn = torch.linalg.qr(torch.randn(32, 24, generator=draw, dtype=torch.float64)).Q
    order = torch.randperm(200, generator=draw)
    y = (2 * x @ turn.T + 1 + 0.2 * torch.randn(200, 32, generator=draw, dtype=torch.float64))[order]
    true = order.argsort()[:60].tolist()
    assert list(select_anchors(y, 60, "bootstrap", features=y, anchors=x[:60], seeds=true[:seeds]).ids) == true
    alone = Bootstrap(x[:60], true[:seeds])._assigned(x[:60], y, torch.arange(seeds), torch.tensor(true[:seeds]))[0]
    assert seeds > 3 or (alone == torch.tensor(true)).float().mean() < 0.7


def test_out_of_domain_anchors_are_none_of_the_domain() -> None:
    far = torch.arange(60) % 3 == 0
    chosen = select_anchors(DATA, 20, "ood", features=ROWS + 50 * far[:, None], domain=ROWS)
    assert sorted(chosen.ids) == far.nonzero()[:, 0].tolist()


BOOTSTRAP = {"features": ROWS, "anchors": ROWS[:10], "seeds": [0, 1, 2]}
FAR = {"features": ROWS + 50 * (torch.arange(60) % 3 == 0)[:, None], "domain": ROWS}
REFUSALS: list[tuple[Any, dict[str, Any], str]] = [
    ((DATA, 61), {}, "from 1 to 60, the number of samples, got 61"),
    ((DATA, 0), {}, "got 0"),
    ((torch.randn(5, 2), 3, "stratified"), {}, "requires samples with labels"),
    ((DATA, 3, "kmeans"), {}, "pass features"),
    ((DATA, 3, "kmeans"), {"features": ROWS[1:]}, r"shape \(60, d\), .* got torch.float32 of shape \(59, 3\)"),
    ((DATA, 3, "kmeans"), {"features": ROWS / 0 * 0}, "row 0 of the features contains NaN"),
    ((DATA, 3, "kmeans"), {"features": torch.ones(60, 2)}, "only 1 of 60 samples have different features"),
    ((DATA, 3, "farthest_point"), {"features": torch.ones(60, 2)}, "only 1 of 60 samples"),
    ((DATA, 3, "randum"), {}, "did you mean 'random'"),
    ((DATA, 10, "bootstrap"), BOOTSTRAP | {"seeds": [0, 1]}, "at least 3 different seeds"),
    ((DATA, 10, "bootstrap"), BOOTSTRAP | {"seeds": [0, 1, 1]}, "got 3 seeds, 2 different"),
    ((DATA, 10, "bootstrap"), BOOTSTRAP | {"seeds": [0, 1, 99]}, "not among the samples, first 99"),
    ((DATA, 10, "bootstrap"), BOOTSTRAP | {"rounds": 0}, "rounds must be an integer >= 1"),
    ((DATA, 10, "bootstrap"), BOOTSTRAP | {"anchors": torch.ones(10, 3)}, "same representation"),
    ((DATA, 10, "bootstrap"), BOOTSTRAP | {"anchors": ROWS[:11]}, "must be 11, the number of anchors, got 10"),
    ((DATA, 3, "frequency"), {"counts": {0: 9, 1: 7}}, "2 of 60 samples have a count above 0, but 3 were"),
    ((DATA, 3, "parallel"), {"ids": [0, "x", "y"]}, "2 of 3 ids .* not among the samples, first 'x'"),
    ((DATA, 3, "parallel"), {"ids": [0, 1]}, "3 parallel anchors were requested, but only 2 ids were given"),
    ((DATA, 21, "ood"), FAR, "20 of 60 samples are out of domain, but 21 were"),
    ((DATA, 5, "ood"), FAR | {"domain": ROWS[:, :2]}, "domain has width 2, but the features have width 3"),
]


@pytest.mark.parametrize(("arguments", "options", "message"), REFUSALS)
def test_a_choice_that_cannot_be_made_is_refused(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_anchors(*arguments, **options)


# -- sets


@pytest.fixture
def chosen() -> Samples:
    return select_anchors(DATA, 12)


def test_anchors_are_encoded_in_their_order(chosen: Samples) -> None:
    a = encoder()
    anchors = AnchorSet.of(chosen).encode(a, "1", chosen, batch_size=5).encode(a, "3", chosen)
    raw = torch.stack([sample for batch in chosen.batches(12) for sample in batch.samples])
    torch.testing.assert_close(anchors.values(a, "1"), a.model[:2](raw).detach())
    assert anchors.values(a.pinned, "3").shape == (12, 5)
    assert (len(anchors), repr(anchors)) == (12, "AnchorSet(12 anchors, encoded by 2)")


def test_other_samples_layers_rows_and_encoders_are_refused(chosen: Samples) -> None:
    a, b = encoder(), encoder(1)
    plain = AnchorSet.of(chosen)
    anchors = plain.encode(a, "1", chosen)
    assert anchors.encode(a, "1", chosen) is anchors
    images = Samples.of(torch.randn(4, 3, 8, 8))
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    convolutions = hf_stitch.load(net, example_inputs=torch.randn(2, 3, 8, 8))
    for call, message in (
        (lambda: plain.encode(a, "1", chosen.select(range(11, -1, -1))), "same samples in a different order"),
        (lambda: plain.encode(a, "1", select_anchors(DATA, 12, seed=1)), "different samples"),
        (lambda: plain.encode(a, "1", Samples.of(torch.randn(12, 4), id=chosen.ids)), "ids .* but different content"),
        (lambda: anchors.values(a, "3"), r"not encoded .* '3' \(mean\); the set contains this encoder with another"),
        (lambda: anchors.values(a, "1", "flatten"), r"not encoded .* '1' \(flatten\); the set contains this encoder"),
        (lambda: anchors.values(b, "1"), r"weights or settings: Sequential, .* parameters, sha256:\w+ 1 \(mean\)"),
        (lambda: anchors.add(torch.randn(12, 8), a.pinned, "1"), "is already in this set"),
        (lambda: anchors.add(torch.randn(3, 5), b.pinned, "1"), "12 anchors require one representation each, got 3"),
        (lambda: AnchorSet.of(images).encode(convolutions, "1", images, "none"), "'none' returns 144 .* for 4 samples"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("other", ["activation", "hook"])
def test_user_code_with_equal_weights_is_another_encoder_if_it_differs(chosen: Samples, other: str) -> None:
    linear = nn.Linear(4, 8)
    a = hf_stitch.load(nn.Sequential(linear, nn.Tanh(), nn.Identity()), example_inputs=torch.randn(2, 4))
    anchors = AnchorSet.of(chosen).encode(a, "1", chosen, progress=False)
    last = nn.Sequential(linear, nn.ReLU() if other == "activation" else nn.Tanh(), nn.Identity())
    b = hf_stitch.load(last, example_inputs=torch.randn(2, 4))
    if other == "hook":
        last.register_forward_pre_hook(lambda _, args, named: (args, {"input": named["input"] * 1.5}), with_kwargs=True)
    assert not anchors.has(b, "1")
    both = anchors.encode(b, "1", chosen, progress=False)
    assert not torch.equal(both.values(a, "1"), both.values(b, "1"))


def test_equal_weights_are_not_taken_for_the_same_encoder(chosen: Samples) -> None:
    """Nor are equal attributes beside them, of which the code computes something else."""
    linear = nn.Linear(4, 8)

    def scaled(factor: float) -> hf_stitch.Adapter:
        class Scaled(nn.Module):
            def forward(self, input: torch.Tensor) -> torch.Tensor:
                return input * factor

        return hf_stitch.load(nn.Sequential(linear, Scaled(), nn.Identity()), example_inputs=torch.randn(2, 4))

    anchors = AnchorSet.of(chosen).encode(scaled(1), "1", chosen, progress=False)
    b = scaled(1.5)
    assert anchors.has(b, "1")
    with pytest.raises(ValueError, match=r"has the weights of .* parameters, sha256:.*, but returns different repr"):
        anchors.encode(b, "1", chosen, progress=False)


def test_encoders_with_other_settings_are_kept_apart(chosen: Samples) -> None:
    gelu, relu = (
        ModelReference("org/name", "transformers", weights_hash="sha256:0", config=Settings({"hidden_act": act}))
        for act in ("gelu", "relu")
    )
    rows = torch.randn(12, 3)
    anchors = AnchorSet.of(chosen).add(rows, gelu, "1")
    rows.zero_()  # a set keeps a copy
    assert anchors.values(gelu, "1").all()
    assert anchors.has(gelu, "1") and not anchors.has(relu, "1")
    assert anchors.has(ModelReference("org/name", "transformers", weights_hash="sha256:0"), "1")  # an older record
    both = anchors.add(torch.randn(12, 3), relu, "1")
    assert not torch.equal(both.values(gelu, "1"), both.values(relu, "1"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_duplicates_are_found_up_to_rounding(dtype: torch.dtype) -> None:
    reference, anchors = ModelReference(None, "torch", weights_hash="sha256:0"), AnchorSet.of(DATA.take(50))
    rows = torch.randn(50, 300, dtype=dtype)
    rows[41] = rows[3]
    if dtype != torch.bfloat16:  # computed in another batch
        rows[41] += 4 * torch.finfo(dtype).eps * torch.randn(300, dtype=dtype)
        assert not torch.equal(rows[41], rows[3])
    with pytest.raises(ValueError, match=r"anchors 3 and 41 have the same .*\(49 of 50 differ\)"):
        anchors.add(rows, reference, "1")
    rows[41] = rows[3] + (0.05 if dtype == torch.bfloat16 else 1e-2)
    anchors.add(100 + rows if dtype != torch.bfloat16 else rows, reference, "1")


def test_near_duplicates_are_told_and_other_images_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (40, 16, 16, 3), generator=generator, dtype=torch.uint8)
    one_pixel = pixels.clone()
    one_pixel[7] = pixels[3]
    one_pixel[7, 8, 8] = 255 - one_pixel[7, 8, 8]
    for made in (lambda x: Image.fromarray(x.numpy()), lambda x: x.float()):
        with pytest.warns(UserWarning, match=r"anchors (3 and 7|7 and 3) are nearly the same sample"):
            AnchorSet.of(Samples.of([made(x) for x in one_pixel]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            AnchorSet.of(Samples.of([made(x) for x in pixels]))


def test_few_anchors_and_missing_ids_are_told() -> None:
    anchors, ids = torch.randn(6, 4), tuple("abcdef")
    with pytest.warns(UserWarning, match="2 anchors describe a vector by two numbers"):
        RelativeProjection.of(anchors[:2])
    one = RelativeProjection.of(anchors, ids=ids)
    with pytest.warns(UserWarning, match="cannot check that these are the samples of the projection.* pass ids="):
        one.with_anchors(anchors)
    with pytest.raises(ValueError, match=r"these are not the anchors of the projection: .*a different order"):
        one.with_anchors(anchors.flip(0), ids[::-1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RelativeProjection.of(anchors[:3], center=True)
        assert one.with_anchors(2 * anchors, ids).ids == ids


def test_a_set_is_read_as_it_was_written(chosen: Samples, tmp_path: Path) -> None:
    a, b = encoder(), encoder(1)
    anchors = AnchorSet.of(chosen).encode(a, "1", chosen).encode(b, "3", chosen)
    reference = ModelReference(str(tmp_path), "timm", weights_hash="sha256:1")
    anchors = anchors.add(torch.randn(12, 7).bfloat16(), reference, "x")
    anchors.save_pretrained(tmp_path / "set")
    again = AnchorSet.from_pretrained(tmp_path / "set")
    assert (again.ids, again.fingerprint) == (anchors.ids, anchors.fingerprint)
    for one, other in zip(again.encoded, anchors.encoded, strict=True):
        assert torch.equal(one.values, other.values) and one.values.dtype == other.values.dtype
        assert (one.layer, one.pooling) == (other.layer, other.pooling)
    assert torch.equal(again.values(b, "3"), anchors.values(b, "3"))
    assert str(tmp_path) not in (tmp_path / "set" / "anchors.json").read_text()
    AnchorSet.of(chosen).save_pretrained(tmp_path / "empty")
    assert not AnchorSet.from_pretrained(tmp_path / "empty").encoded


@pytest.mark.parametrize("damage", ["json", "format", "tensors", "other tensors", "key", "short"])
def test_a_damaged_set_is_refused(chosen: Samples, tmp_path: Path, damage: str) -> None:
    AnchorSet.of(chosen).encode(encoder(), "1", chosen).save_pretrained(tmp_path)
    config, weights = tmp_path / "anchors.json", tmp_path / "anchors.safetensors"
    described = json.loads(config.read_text())
    if damage == "other tensors":
        AnchorSet.of(chosen).encode(encoder(1), "1", chosen).save_pretrained(tmp_path / "other")
        (tmp_path / "other" / weights.name).replace(weights)
    elif damage == "tensors":
        weights.write_bytes(weights.read_bytes()[:-9])
    elif damage == "json":
        config.write_text("{")
    else:
        changes = {"format": {"format": 3}, "key": {"encoded": []}, "short": {"ids": described["ids"][1:]}}
        config.write_text(json.dumps(described | changes[damage]))
    with pytest.raises(ValueError, match=r"cannot be read|anchors\.safetensors was not saved with this anchors\.json"):
        AnchorSet.from_pretrained(tmp_path)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"does not contain anchors\.safetensors"):
        AnchorSet.from_pretrained(tmp_path)
