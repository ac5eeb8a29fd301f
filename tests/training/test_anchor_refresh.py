"""Anchors that keep up with an encoder in training, without its noticing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_stitch
from hf_stitch.relative import RelativeProjection
from hf_stitch.training import AnchorRefresh

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
LABELS = (X[:, 0] > 0).long()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())
    return nn.Sequential(body, RelativeProjection.of(torch.randn(10, 8)), nn.Linear(10, 2)).train()


def states(model: nn.Module) -> tuple[Any, ...]:
    kept = {name: value.clone() for name, value in model.state_dict().items() if "anchors" not in name}
    return kept, [module.training for module in model.modules()], torch.get_rng_state()


@pytest.mark.parametrize("training", [False, True])
def test_nothing_but_the_anchors_changes(training: bool) -> None:
    model = network()
    refresh = AnchorRefresh(model, X[:10], model[0], training=training, batch_size=10)
    before = states(model)
    refresh.refresh()
    after = states(model)
    assert before[1] == after[1]
    assert torch.equal(before[2], after[2])
    assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())
    model.train(training)
    model[0][2].eval()
    with torch.no_grad():
        alike = torch.allclose(model[0](X[:10]), model[1].anchors)
    assert alike is not training  # in training mode, dropout drew
    assert not model[1].anchors.requires_grad


def test_a_loop_of_one_s_own_refreshes_every_so_often() -> None:
    model = network().eval()
    refresh = AnchorRefresh(model, X[:10], model[0], every=3, batch_size=4)
    seen = []
    for _ in range(7):
        refresh.step()
        seen.append(model[1].anchors.clone())
        with torch.no_grad():
            model[0][0].weight.mul_(1.1)
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
    assert changed == [False, False, True, False, False, True]


def test_an_encoder_outside_the_model_is_put_in_eval_mode_and_left_as_it_was() -> None:
    whole = network()
    encoder, rest = whole[0], nn.Sequential(whole[1], whole[2])
    before = states(whole)
    AnchorRefresh(rest, X[:10], encoder).refresh()
    after = states(whole)
    assert before[1] == after[1]
    assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())
    with torch.no_grad():
        torch.testing.assert_close(rest[0].anchors, encoder.eval()(X[:10]))


def test_the_mean_of_a_stitched_model_follows_its_anchors() -> None:
    encoder = hf_stitch.load(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), example_inputs=torch.randn(2, 4))
    model = hf_stitch.relative_model(
        encoder, X[:10], layer="1", num_labels=2, task="image-classification", progress=False
    )
    before = model.stitch.body_mean.clone()
    with torch.no_grad():
        model.source.model[0].weight.mul_(-3)
        model.source.model[0].bias.add_(1)
    AnchorRefresh(model, X[:10], training=True).refresh()
    torch.testing.assert_close(model.stitch.body_mean, model.stitch.body(embedded(model)).mean(0))
    assert not torch.allclose(model.stitch.body_mean, before)


class Looks(TrainerCallback):
    """Compares the anchors with what the encoder says of them at every evaluation."""

    def __init__(self, model: hf_stitch.StitchedModel) -> None:
        self.model, self.seen = model, []

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.seen.append(torch.equal(self.model.stitch.body.anchors, embedded(self.model)))


def embedded(model: hf_stitch.StitchedModel) -> Tensor:
    with torch.no_grad():
        return model.source(input=X[:10]).values


def test_trainer_trains_end_to_end_and_evaluates_with_the_anchors_at_hand(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = hf_stitch.load(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), example_inputs=torch.randn(2, 4))
    model = hf_stitch.relative_model(
        encoder, X[:10], layer="1", num_labels=2, task="image-classification", progress=False
    )
    model.source.requires_grad_(True)
    first = model.stitch.body.anchors.clone()
    rows = Dataset.from_dict({"pixel_values": X.tolist(), "labels": LABELS.tolist()}).with_format("torch")
    arguments = TrainingArguments(
        str(tmp_path), max_steps=24, learning_rate=0.05, report_to=[], eval_strategy="steps", eval_steps=7,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    looks = Looks(model)
    trainer = Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows,
        callbacks=[AnchorRefresh(model, X[:10], every=4), looks],
    )  # fmt: skip
    trainer.train()
    assert looks.seen == [True, True, True, True]
    assert torch.equal(model.stitch.body.anchors, embedded(model))
    assert not torch.allclose(model.stitch.body.anchors, first)
    assert trainer.evaluate()["eval_loss"] < 0.5


def test_how_often_one_evaluates_changes_nothing(tmp_path: Path) -> None:
    def trained(**options: Any) -> hf_stitch.StitchedModel:
        torch.manual_seed(0)
        encoder = hf_stitch.load(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), example_inputs=torch.randn(2, 4))
        model = hf_stitch.relative_model(encoder, X[:10], layer="1", num_labels=2, task="image-classification")
        model.source.requires_grad_(True)
        rows = Dataset.from_dict({"pixel_values": X.tolist(), "labels": LABELS.tolist()}).with_format("torch")
        arguments = TrainingArguments(
            str(tmp_path), max_steps=10, learning_rate=0.05, report_to=[], save_strategy="no", disable_tqdm=True,
            **options,
        )  # fmt: skip
        refresh = AnchorRefresh(model, X[:10], every=4)
        Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[refresh]).train()
        return model

    often, never = trained(eval_strategy="steps", eval_steps=1), trained(eval_strategy="no")
    for name, value in often.state_dict().items():
        assert torch.equal(value, never.state_dict()[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anchors": X[:9]}, "has 10 anchors, got 9"),
        ({"every": 0}, "at least 1"),
        ({"encoder": None}, "say how anchors are encoded"),
        ({"model": nn.Linear(2, 2)}, "Linear holds 0 relative projections"),
    ],
)
def test_what_cannot_be_refreshed_is_refused(options: dict[str, Any], message: str) -> None:
    model = network()
    with pytest.raises(ValueError, match=message):
        AnchorRefresh(**{"model": model, "anchors": X[:10], "encoder": model[0], **options})


def test_a_dead_encoder_is_told() -> None:
    model = network()
    model[0][0].weight.data.zero_()
    with pytest.raises(ValueError, match="all 10 anchors have the same representation"):
        AnchorRefresh(model, X[:10], model[0]).refresh()
