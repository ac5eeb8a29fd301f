"""Relative models, and exchange of the encoder of a trained head."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import Trainer, TrainingArguments

import hf_stitch
from hf_stitch.artefacts import Head, HeadConfig
from hf_stitch.artefacts.card import card
from hf_stitch.data import Samples
from hf_stitch.matchers.alignment import InverseRelative
from hf_stitch.registry import registries
from hf_stitch.relative import AnchorSet, RelativeProjection, select_anchors

X = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
LABELS = [int(x > 0) + 2 * int(y > 0) for x, y in X[:, :2]]
DATA = Samples.of(X, label=LABELS)
TRAIN, TEST = DATA.split(100)
ANCHORS = select_anchors(TRAIN, 20)
TASK = "image-classification"
LAYER = "2"
EXACT = InverseRelative(rcond=1e-6)
"""Exact for encoders that differ by a rotation; the default tolerance drops directions of small variance."""


def encoders() -> tuple[hf_stitch.Adapter, hf_stitch.Adapter]:
    """Two encoders, each with a classifier; the second rotates, scales and shifts the activations of the first."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 12), nn.Tanh())
    turn = nn.Linear(12, 12)
    turn.weight.data = 3 * torch.linalg.qr(torch.randn(12, 12)).Q
    a = nn.Sequential(*body, nn.Identity(), nn.Linear(12, 4))
    b = nn.Sequential(*body, turn, nn.Linear(12, 4))
    return tuple(hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in (a, b))  # type: ignore[return-value]


A, B = encoders()
WIDER = hf_stitch.load(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 15)), example_inputs=torch.randn(2, 4))


def trained(similarities: Any = "cosine", **options: Any) -> hf_stitch.StitchedModel:
    """A model of encoder A whose head was trained alone on precomputed vectors."""
    anchors = AnchorSet.of(ANCHORS).encode(A, LAYER, ANCHORS, progress=False)
    rows = A.encode(torch.stack([X[i] for i in TRAIN.ids]), LAYER)[LAYER].rows("mean").detach()
    if similarities is not None:
        rows = RelativeProjection.of(anchors.values(A, LAYER), similarities, **options)(rows)
    torch.manual_seed(0)
    head = Head(HeadConfig(in_features=rows.shape[1], num_labels=4))
    optimizer, labels = torch.optim.Adam(head.parameters(), 1e-2), torch.tensor(TRAIN.labels)
    head.train()
    for _ in range(60):
        optimizer.zero_grad()
        head(rows, labels=labels).loss.backward()
        optimizer.step()
    return hf_stitch.relative_model(A, anchors, similarities, layer=LAYER, head=head.eval(), task=TASK, **options)


RELATIVE = trained(center=True)
ABSOLUTE = trained(None)


def printed(result: Any) -> str:
    return " ".join(str(result).split())


def accuracy(model: hf_stitch.StitchedModel) -> float:
    inputs = torch.stack([X[i] for i in TEST.ids])
    return float((model(input=inputs).logits.argmax(1) == torch.tensor(TEST.labels)).float().mean())


def swap(model: Any, encoder: Any = B, anchors: Any = None, **options: Any) -> hf_stitch.StitchedModel:
    """Exchange the encoder, whose layer has the same name in all networks here, without a bar."""
    layer = {} if isinstance(encoder, hf_stitch.StitchedModel) else {"encoder_layer": LAYER}
    return hf_stitch.swap(model, encoder, anchors, **{**layer, "progress": False, **options})


# -- heads
def test_a_head_is_saved_loaded_and_rebuilt_like_a_model_of_transformers(tmp_path: Path) -> None:
    head, x = Head(HeadConfig(in_features=7, hidden_size=5, num_labels=3)).eval(), torch.randn(4, 7)
    head.save_pretrained(tmp_path)
    assert torch.equal(hf_stitch.load(str(tmp_path)).forward(x).logits, head(x).logits)
    assert torch.equal(Head.from_pretrained(tmp_path)(x).logits, head(x).logits)


@pytest.mark.parametrize(("kind", "depends"), [("inductive", False), ("paper", True)])
def test_only_predictions_of_the_head_of_the_paper_depend_on_the_batch(kind: str, depends: bool) -> None:
    torch.manual_seed(0)
    head, x = Head(HeadConfig(in_features=7, num_labels=3, kind=kind)).eval(), torch.randn(8, 7)
    alone, among = head(x[:4]).logits, head(x).logits[:4]
    assert (not torch.allclose(alone, among, atol=1e-3)) is depends
    if kind == "paper":
        torch.testing.assert_close(head.body[3](x), nn.InstanceNorm1d(7)(x.T).T)


def test_trainer_trains_a_head_alone_and_with_a_frozen_encoder(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), max_steps=3, report_to=[], save_strategy="no", disable_tqdm=True)
    head = Head(HeadConfig(in_features=4, num_labels=4))
    before = {name: value.clone() for name, value in head.state_dict().items()}
    rows = Dataset.from_dict({"features": X.tolist(), "labels": LABELS}).with_format("torch")
    assert Trainer(head, arguments, train_dataset=rows).train().training_loss > 0
    assert all(not torch.equal(value, before[name]) for name, value in head.state_dict().items())

    model = hf_stitch.relative_model(A, ANCHORS, layer=LAYER, num_labels=4, task=TASK, progress=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = Dataset.from_dict({"pixel_values": X.tolist(), "labels": LABELS}).with_format("torch")
    Trainer(model, arguments, train_dataset=rows).train()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) is not name.startswith("target."), name


# -- relative models
def test_a_relative_model_equals_its_parts_in_sequence() -> None:
    x = torch.randn(5, 4)
    assert torch.equal(RELATIVE.transfer(input=x).values, RELATIVE.stitch.body(A.encode(x, LAYER)[LAYER].values))
    assert accuracy(RELATIVE) > 0.8
    assert accuracy(ABSOLUTE) > 0.8
    assert RELATIVE.anchors is not None
    assert len(RELATIVE.anchors) == 20


def test_any_module_can_be_the_head() -> None:
    decoder = nn.Sequential(nn.LayerNorm(20), nn.Linear(20, 4))
    state = torch.get_rng_state()
    model = hf_stitch.relative_model(A, ANCHORS, "angular", layer=LAYER, head=decoder, center=True, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    swapped = swap(model, anchors=ANCHORS)
    x = torch.randn(5, 4)
    torch.testing.assert_close(swapped(input=x), model(input=x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["source", "target"])
def test_models_with_trained_halves_have_no_stitcher(side: Any, tmp_path: Path) -> None:
    head = Head(HeadConfig(in_features=20, num_labels=4))
    model = hf_stitch.relative_model(A, ANCHORS, layer=LAYER, head=head, task=TASK, progress=False)
    assert model.stitcher.attach(A, head)(input=X[:3]).logits.equal(model(input=X[:3]).logits)
    with torch.no_grad():
        next(getattr(model, side).parameters()).mul_(2)
    with pytest.raises(ValueError, match=f"the {side} half was trained .* save the whole model"):
        _ = model.stitcher


def test_a_saved_model_records_which_half_was_trained(net: Any, images: Any, tmp_path: Path) -> None:
    anchors = Samples.of(images).take(12)
    model = hf_stitch.relative_model(net("cnn"), anchors, layer="layer4.0", num_labels=5, progress=False)
    with torch.no_grad():
        model.target.model.classifier.bias.add_(1)
    model.save_pretrained(tmp_path)
    again = hf_stitch.StitchedModel.from_pretrained(tmp_path)
    assert (again.has_changed("source"), again.has_changed("target")) == (False, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": {"in_features": 0}}, "in_features"),
        ({"config": {"kind": "both"}}, "kind"),
        ({"config": {"hidden_act": "sillu"}}, "hidden_act"),
        ({}, "exactly one of head and num_labels"),
        ({"head": Head(HeadConfig(in_features=19, num_labels=2))}, "expects 19 features, got 20"),
        (
            {"num_labels": 2, "similarities": None, "center": True},
            "options of the projection require similarities, got center",
        ),
        ({"num_labels": 2, "similarities": "change_of_basis", "anchors": ANCHORS.take(12), "center": True}, "span"),
    ],
)
def test_invalid_heads_and_relative_models_are_rejected(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        if config := given.pop("config", None):
            HeadConfig(**{"in_features": 3, **config})
        hf_stitch.relative_model(A, given.pop("anchors", ANCHORS), layer=LAYER, progress=False, **given)


# -- swapping
@pytest.mark.parametrize(
    "new", [{"encoder": B, "encoder_layer": LAYER, "anchors": ANCHORS}, {"encoder": RELATIVE}], ids=["network", "model"]
)
def test_a_swap_leaves_out_the_scores_and_the_verdict_of_the_model_before(new: dict[str, Any]) -> None:
    model = copy.deepcopy(RELATIVE)
    model.keep_scores(audit={"verdict": "accurate"})
    model.config.scores = {"task": "image-classification"}
    swapped = swap(model, **new)
    assert model.config.recipe.keys() - swapped.config.recipe.keys() >= {"audit", "scored_weights"}
    assert swapped.config.scores is None


def test_a_rotated_scaled_and_shifted_encoder_leaves_predictions_of_a_relative_model_unchanged() -> None:
    swapped = swap(RELATIVE, anchors=ANCHORS, data=TEST)
    x = torch.randn(9, 4)
    torch.testing.assert_close(swapped(input=x).logits, RELATIVE(input=x).logits, rtol=1e-3, atol=1e-3)
    scores = swapped.evaluation.scores
    assert set(scores) == {"stitched", "identity", "mean_only", "target", "chance"}
    assert scores["target"]["accuracy"].value == pytest.approx(accuracy(RELATIVE))
    assert scores["stitched"]["agreement"].value > 0.98
    assert scores["identity"]["accuracy"].value < 0.7
    assert swapped.anchors is not None
    assert swapped.anchors.has(B, LAYER)
    # The anchor set now contains both encodings, so the swap back needs no samples.
    assert torch.equal(swap(swapped, encoder=A)(input=x).logits, RELATIVE(input=x).logits)


def decoded() -> hf_stitch.StitchedModel:
    """A relative model without a task, whose head is a module of user code."""
    return hf_stitch.relative_model(A, ANCHORS, layer=LAYER, head=nn.Linear(len(ANCHORS), 7), progress=False)


@pytest.mark.parametrize("kind", ["relative", "absolute", "own module", "trained end to end"])
def test_a_relative_model_with_its_first_encoder_is_scored_beside_itself(kind: str) -> None:
    model = copy.deepcopy(ABSOLUTE if kind == "absolute" else decoded() if kind == "own module" else RELATIVE)
    if kind == "trained end to end":
        model.source.model[0].bias.data.add_(0.5)
    quiet: Any = {"progress": False, "resamples": 20}
    found = hf_stitch.evaluate(model, TEST, **quiet)
    assert repr(found.scores) == repr(hf_stitch.evaluate(model, TEST, target=model, **quiet).scores)
    if kind == "own module":
        assert found["r2"].value == pytest.approx(1)
    else:
        assert found["accuracy"].value == found.scores["target"]["accuracy"].value == pytest.approx(accuracy(model))
        assert found["agreement"].value == 1 > found.scores["mean_only"]["agreement"].value
    assert hf_stitch.plan(hf_stitch.evaluate, model, TEST).seconds > 0


@pytest.mark.parametrize("similarities", ["cosine", None])
def test_a_saved_relative_model_is_scored(similarities: str | None, net: Any, images: Any, tmp_path: Path) -> None:
    net("vit").model.save_pretrained(tmp_path / "encoder")
    encoder, samples = hf_stitch.load(str(tmp_path / "encoder")), Samples.of(images)
    options: dict[str, Any] = {"layer": encoder.layers[1], "num_labels": 5, "progress": False}
    model = hf_stitch.relative_model(encoder, samples.take(12), similarities, **options)
    model.save_pretrained(tmp_path / "model")
    rest = samples.select(range(12, len(samples)))
    for scored in (model, hf_stitch.StitchedModel.from_pretrained(tmp_path / "model")):
        assert hf_stitch.evaluate(scored, rest, progress=False)["agreement"].value == 1


def test_after_a_swap_the_model_with_the_first_encoder_is_asked_for() -> None:
    swapped = swap(RELATIVE, anchors=ANCHORS)
    mapped = swap(ABSOLUTE, anchors=ANCHORS, matcher=EXACT)
    assert hf_stitch.evaluate(swapped, TEST, target=RELATIVE, progress=False)["agreement"].value > 0.98
    for job in (hf_stitch.evaluate, hf_stitch.audit):
        with pytest.raises(ValueError, match=r"relative model requires target=.* to hf_stitch.evaluate"):
            job(swapped, TEST, progress=False)
        with pytest.raises(ValueError, match=r"the target, .*, was a module in memory"):
            job(mapped, TEST, progress=False)
    with pytest.raises(ValueError, match="relative model requires target="):
        hf_stitch.audit(RELATIVE, TEST, progress=False)


def test_an_absolute_model_needs_a_map() -> None:
    def swapped(matcher: Any, **options: Any) -> hf_stitch.StitchedModel:
        return swap(ABSOLUTE, anchors=ANCHORS, matcher=matcher, **options)

    inverse = swapped(EXACT, data=TEST, baselines=["identity", "lstsq"])
    assert inverse.evaluation["agreement"].value > 0.98
    assert inverse.evaluation.scores["lstsq"]["agreement"].value > 0.98
    unmapped = inverse.evaluation.scores["identity"]["accuracy"].value
    assert accuracy(swapped("identity")) == pytest.approx(unmapped)
    assert unmapped < 0.7
    # A swapped model can be swapped again, because it keeps the anchors in the space of the head.
    assert accuracy(swap(swapped("lstsq"))) == pytest.approx(inverse.evaluation["accuracy"].value, abs=0.02)


def test_an_absolute_model_trained_end_to_end_is_matched_with_its_current_encoder() -> None:
    model = hf_stitch.relative_model(A, ANCHORS, None, layer=LAYER, num_labels=4, task=TASK, progress=False)
    assert not model.has_changed("source")
    with torch.no_grad():  # as training would
        model.source.model[0].weight.mul_(-2)
        model.source.model[0].bias.add_(0.5)
    assert model.has_changed("source")
    assert not model.has_changed("target")
    now = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Identity())
    now[0].load_state_dict(model.source.model[0].state_dict())
    its_own = hf_stitch.load(now, example_inputs=torch.randn(2, 4))
    swapped = swap(model, encoder=its_own, anchors=ANCHORS, matcher="lstsq")
    x = torch.randn(9, 4)
    torch.testing.assert_close(swapped(input=x).logits, model(input=x).logits, rtol=1e-3, atol=1e-3)
    # The anchor set now contains both encodings.
    assert torch.equal(swap(swapped, encoder=its_own, matcher="lstsq")(input=x).logits, swapped(input=x).logits)
    known = AnchorSet.of(ANCHORS).encode(its_own, "2", ANCHORS, progress=False)
    with pytest.raises(ValueError, match=r"encoder of this absolute model has changed .* pass the anchors as samples"):
        swap(model, encoder=its_own, anchors=known)


@pytest.mark.parametrize("given", ["samples", "set"])
def test_the_encoder_of_a_network_is_replaced_from_anchors_alone(given: str) -> None:
    anchors: Any = ANCHORS
    if given == "set":
        anchors = AnchorSet.of(ANCHORS).encode(A, LAYER, ANCHORS).encode(B, LAYER, ANCHORS)
    swapped = swap(A, target_layer=LAYER, anchors=anchors, data=TEST, task=TASK)
    assert swapped.evaluation["agreement"].value > 0.98
    assert {"inverse_relative", "identity", "mean_only", "target", "chance"} < set(swapped.evaluation.scores)
    assert swapped.config.recipe["matcher"]["name"] == "procrustes"
    assert swapped.config.recipe["matcher"]["scale"] is True
    assert swap(swapped, encoder=WIDER, anchors=ANCHORS).stitch.widths == (15, 12)


NOISE = 0.1 * torch.randn(12, 12, generator=torch.Generator().manual_seed(1))
NEXT_TO_LAST: dict[str, tuple[torch.Tensor, int]] = {
    "procrustes": (B.model[2].weight.data, 20),  # type: ignore[index]
    "ridge": (torch.linspace(0.1, 3, 12).diag() + NOISE, 100),
    "identity": (torch.eye(12) + NOISE / 3, 5),
}


@pytest.mark.parametrize("expected", NEXT_TO_LAST)
def test_auto_takes_the_matcher_that_changes_the_head_least_on_held_out_anchors(expected: str) -> None:
    """A rotated encoder needs an orthogonal map, one with features of other scales another; one that is near, none."""
    weight, count = NEXT_TO_LAST[expected]
    last = nn.Linear(12, 12, bias=False)
    last.weight.data = weight
    other = hf_stitch.load(nn.Sequential(*A.model[:2], last), example_inputs=torch.randn(2, 4))  # type: ignore[index]
    place: dict[str, Any] = {"target_layer": LAYER, "task": TASK}
    swapped = swap(A, other, TRAIN.take(count), data=TEST, **place)
    recipe = swapped.config.recipe
    assert recipe["matcher"]["name"] == expected
    assert min(recipe["held_out_errors"], key=recipe["held_out_errors"].get) == expected
    assert f"matcher {expected}, by the error on held-out anchors (procrustes " in printed(swapped.evaluation)
    assert "| chosen by the error on held-out anchors | identity = " in card(swapped.describe())
    found_by = registries.matchers.build(expected, **({"scale": True} if expected == "procrustes" else {}))
    given = swap(A, other, TRAIN.take(count), matcher=found_by, **place)
    x = torch.randn(5, 4)
    assert torch.equal(given(input=x).logits, swapped(input=x).logits)
    assert given.config.stitch == swapped.config.stitch
    assert "held_out_errors" not in given.config.recipe


@pytest.mark.parametrize(("anchors", "held_out"), [(2, False), (3, True), (4, True)])
def test_auto_holds_out_one_anchor_at_a_time_if_there_are_few(anchors: int, held_out: bool) -> None:
    swapped = swap(A, B, TRAIN.take(anchors), target_layer=LAYER, task=TASK)
    assert ("held_out_errors" in swapped.config.recipe) is held_out
    assert held_out or swapped.config.recipe["matcher"]["name"] == "procrustes"


def test_auto_says_if_the_head_cannot_be_compared() -> None:
    class OverBatch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(0)

    mean = hf_stitch.load(nn.Sequential(*A.model[:3], OverBatch()), example_inputs=torch.randn(2, 4))  # type: ignore[index]
    with pytest.raises(ValueError, match=r"matcher='auto' requires a head .* pass another"):
        swap(mean, B, ANCHORS, target_layer=LAYER, task=None)
    assert swap(mean, B, ANCHORS, matcher="ridge", target_layer=LAYER, task=None).stitch.widths == (12, 12)


def test_encoders_can_take_paired_samples() -> None:
    """Each paired anchor is the negated sample, and its encoder reverses the sign."""
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Identity())
    other[0].weight.data, other[0].bias.data = -A.model[0].weight.data, A.model[0].bias.data  # type: ignore
    c = hf_stitch.load(other, example_inputs=torch.randn(2, 4))
    parallel, test = (Samples.of(-X[list(s.ids)], id=s.ids, label=s.labels) for s in (ANCHORS, TEST))
    swapped = swap(RELATIVE, encoder=c, paired_anchors=parallel, data=test, paired_data=TEST)
    assert swapped.evaluation["agreement"].value == 1
    assert swapped.config.recipe["paired_anchors"] == parallel.fingerprint
    with pytest.raises(ValueError, match=r"not parallel: .*a different order"):
        swap(RELATIVE, encoder=c, paired_anchors=parallel.select(range(19, -1, -1)))
    absolute = swap(ABSOLUTE, encoder=c, paired_anchors=parallel, matcher=EXACT, data=test, paired_data=TEST)
    assert absolute.evaluation["agreement"].value > 0.98


def test_relative_models_trained_end_to_end_exchange_their_halves() -> None:
    def of(encoder: hf_stitch.Adapter) -> hf_stitch.StitchedModel:
        torch.manual_seed(1)
        options: dict[str, Any] = {"num_labels": 4, "task": TASK, "progress": False}
        return hf_stitch.relative_model(encoder, ANCHORS, layer=LAYER, center=True, **options)

    one, other = of(A), of(B)
    with torch.no_grad():  # as after training: both halves change, and the anchors are encoded again
        for model in (one, other):
            model.source.model[0].bias.add_(0.5)
            model.stitch.body.anchors.copy_(model.source(input=torch.stack([X[i] for i in ANCHORS.ids])).values)
        one.target.model.classifier.weight.mul_(-2)
    swapped = swap(one, encoder=other, data=TEST)
    x = torch.randn(9, 4)
    torch.testing.assert_close(swapped(input=x).logits, one(input=x).logits, rtol=1e-3, atol=1e-3)
    assert swapped.evaluation["agreement"].value > 0.98
    uncentred = hf_stitch.relative_model(B, ANCHORS, layer=LAYER, num_labels=4, task=TASK, progress=False)
    with pytest.raises(ValueError, match="projections of the two models differ: center True and False"):
        swap(one, encoder=uncentred)
    with pytest.raises(TypeError, match="both models are relative models"):
        swap(ABSOLUTE, encoder=one)
    with pytest.raises(TypeError, match="only accepts data and paired_data"):
        swap(one, encoder=other, anchors=ANCHORS)


class Unread(list[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, place: int) -> Any:
        raise AssertionError("the data were read")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"anchors": ANCHORS.take(19)}, "there are 20 anchors, got 19"),
        ({"anchors": ANCHORS.select(range(19, -1, -1))}, "not the anchors: .*a different order"),
        ({"anchors": TEST.take(20)}, "not the anchors: .* index 0"),
        ({"anchors": Samples.of(torch.randn(20, 4), id=ANCHORS.ids)}, "different content or labels"),
        ({"paired_anchors": Samples.of(torch.randn(20, 4))}, "not parallel"),
        ({"paired_anchors": Samples.of(torch.zeros(20, 4), id=ANCHORS.ids)}, "20 anchors have the same representation"),
        ({}, "not encoded by .* only encoders with other weights"),
        ({"anchors": RELATIVE.anchors, "encoder": A, "encoder_layer": "1"}, "this encoder with another layer or"),
        ({"encoder": A, "pooling": "cls"}, "with another layer or pooling"),
        ({"anchors": ANCHORS, "encoder_layer": "9"}, "does not exist"),
        ({"anchors": ANCHORS, "matcher": "lstsq"}, "remove matcher and baselines"),
        ({"anchors": ANCHORS, "target_layer": "2"}, "remove target_layer"),
    ],
)
def test_invalid_arguments_are_rejected_before_the_data_are_read(given: dict[str, Any], message: str) -> None:
    options = {"encoder": B, "encoder_layer": LAYER, **given}
    with pytest.raises((ValueError, TypeError), match=message):
        swap(RELATIVE, data=Unread(), **options)


def test_the_anchors_are_saved_and_read_with_model_and_stitcher(net: Any, images: Any, tmp_path: Path) -> None:
    anchors = Samples.of(images).take(12)
    a, b = net("cnn"), net("deit")
    known = AnchorSet.of(anchors).encode(a, "layer4.0", anchors).encode(b, "blocks.2", anchors, "cls")
    model = hf_stitch.relative_model(a, known, layer="layer4.0", num_labels=5, progress=False)
    expected = swap(model, encoder=b, encoder_layer="blocks.2", pooling="cls")
    inputs = model.preprocess([sample["image"] for sample in images[:5]])
    model.save_pretrained(tmp_path)
    again = hf_stitch.StitchedModel.from_pretrained(tmp_path)
    swapped = swap(again, encoder=b, encoder_layer="blocks.2", pooling="cls")
    assert torch.equal(swapped(**inputs).logits, expected(**inputs).logits)
    (tmp_path / "anchors.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"does not contain anchors\.safetensors"):
        hf_stitch.StitchedModel.from_pretrained(tmp_path)
    AnchorSet.of(anchors).encode(a, "layer4.0", anchors).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"anchors\.json was changed since config\.json was saved"):
        hf_stitch.StitchedModel.from_pretrained(tmp_path)


def test_a_map_that_is_worse_than_the_mean_gives_a_warning() -> None:
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 12))
    unrelated = hf_stitch.load(other, example_inputs=torch.randn(2, 4))
    options = {"anchors": ANCHORS, "target_layer": LAYER, "encoder": unrelated, "encoder_layer": "2", "task": TASK}
    with pytest.warns(UserWarning, match=r"worse than the mean of the anchors \(R² -1"):
        swap(A, **options, matcher="identity")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap(A, **options)


# -- anchors among the samples


def test_a_model_is_not_scored_on_its_anchors_which_it_knows_by_their_contents(tmp_path: Path) -> None:
    swapped = swap(RELATIVE, anchors=ANCHORS, data=TEST)
    both = DATA.select([*ANCHORS.ids, *TEST.ids])
    with pytest.warns(UserWarning, match=r"20 of 120 samples are anchors \(first: \d+\) and are left out"):
        again = swap(RELATIVE, anchors=ANCHORS, data=both).evaluation
    assert (again.n, again.scores) == (100, swapped.evaluation.scores)
    swapped.anchors.save_pretrained(tmp_path)
    swapped.anchors = AnchorSet.from_pretrained(tmp_path)
    others = torch.randn(9, 4, generator=torch.Generator().manual_seed(7))
    renamed = Samples.of(others, label=[0] * 9)
    mixed = Samples.of([*others, X[ANCHORS.ids[0]]], label=[0] * 10)
    for scored in (RELATIVE, swapped):
        with pytest.warns(UserWarning, match=r"1 of 10 samples are anchors \(first: 9\)"):
            assert hf_stitch.evaluate(scored, mixed, target=RELATIVE, progress=False).n == 9
        assert hf_stitch.evaluate(scored, renamed, target=RELATIVE, progress=False).n == 9
    assert swapped.anchors.among(mixed) == [9]


def test_a_head_belongs_to_its_anchors(tmp_path: Path) -> None:
    place: dict[str, Any] = {"layer": LAYER, "progress": False}
    model = hf_stitch.relative_model(A, ANCHORS, num_labels=4, task=TASK, **place)
    assert model.target.model.config.anchors_fingerprint == AnchorSet.of(ANCHORS).fingerprint
    head = Head(HeadConfig(in_features=20, num_labels=4))
    hf_stitch.relative_model(A, ANCHORS, head=head, **place)
    head.save_pretrained(tmp_path)
    for trained_head in (head, str(tmp_path)):
        with pytest.raises(ValueError, match=r"similarities to other anchors .*pass its anchors"):
            hf_stitch.relative_model(B, TEST.take(20), head=trained_head, **place)
        hf_stitch.relative_model(B, ANCHORS, head=trained_head, **place)


def test_samples_that_are_preprocessed_otherwise_than_the_anchors_are_told() -> None:
    told = r"differ from its anchors \(means [\d.]+ standard deviations"
    anchors = TRAIN.take(60)
    model = hf_stitch.relative_model(A, anchors, layer=LAYER, num_labels=4, task=TASK, progress=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{told}")
        swapped = swap(model, anchors=anchors, data=TEST)
    otherwise = Samples.of(0.25 * torch.stack([X[i] for i in TEST.ids]) + 0.5, label=TEST.labels)
    for scored in (model, swapped):
        with pytest.warns(UserWarning, match=told):
            hf_stitch.evaluate(scored, otherwise, target=model, progress=False)
