"""Anchor refreshing during training, without side effects."""

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
def test_refresh_changes_only_the_anchors(training: bool) -> None:
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
        equal = torch.allclose(model[0](X[:10]), model[1].anchors)
    assert equal is not training  # in training mode, dropout is active
    assert not model[1].anchors.requires_grad


def test_custom_loop_refreshes_every_three_steps() -> None:
    model = network().eval()
    refresh = AnchorRefresh(model, X[:10], model[0], every=3, batch_size=4)
    seen = []
    for _ in range(7):
        refresh.step()
        seen.append(model[1].anchors.clone())
        with torch.no_grad():
            model[0][0].weight.mul_(1.1)
    assert [not torch.equal(a, b) for a, b in itertools.pairwise(seen)] == [False, False, True, False, False, True]


def test_encoder_outside_the_model_runs_in_eval_mode_and_is_restored() -> None:
    whole = network()
    encoder, rest = whole[0], nn.Sequential(whole[1], whole[2])
    before = states(whole)
    AnchorRefresh(rest, X[:10], encoder).refresh()
    after = states(whole)
    assert before[1] == after[1]
    assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())
    with torch.no_grad():
        torch.testing.assert_close(rest[0].anchors, encoder.eval()(X[:10]))


def test_mean_of_stitched_model_is_updated_with_its_anchors() -> None:
    model = relative()
    before = model.stitch.body_mean.clone()
    with torch.no_grad():
        model.source.model[0].weight.mul_(-3)
        model.source.model[0].bias.add_(1)
    AnchorRefresh(model, X[:10], training=True).refresh()
    torch.testing.assert_close(model.stitch.body_mean, model.stitch.body(embedded(model)).mean(0))
    assert not torch.allclose(model.stitch.body_mean, before)


class AnchorCheck(TrainerCallback):
    """Checks at every evaluation that the anchors equal their current embeddings."""

    def __init__(self, model: hf_stitch.StitchedModel) -> None:
        self.model, self.equal = model, []

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.equal.append(torch.equal(self.model.stitch.body.anchors, embedded(self.model)))


def embedded(model: hf_stitch.StitchedModel) -> Tensor:
    with torch.no_grad():
        return model.source(input=X[:10]).values


def relative() -> hf_stitch.StitchedModel:
    torch.manual_seed(0)
    encoder = hf_stitch.load(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), example_inputs=torch.randn(2, 4))
    options = {"num_labels": 2, "task": "image-classification", "progress": False}
    return hf_stitch.relative_model(encoder, X[:10], layer="1", **options)


def trained(folder: Path, model: hf_stitch.StitchedModel, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    model.source.requires_grad_(True)
    rows = Dataset.from_dict({"pixel_values": X.tolist(), "labels": LABELS.tolist()}).with_format("torch")
    fixed: dict[str, Any] = {"learning_rate": 0.05, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    refresh = AnchorRefresh(model, X[:10], every=4)
    arguments = TrainingArguments(str(folder), **fixed, **options)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[refresh, *callbacks])
    trainer.train()
    return trainer


def test_trainer_trains_end_to_end_and_evaluates_with_current_anchors(tmp_path: Path) -> None:
    model = relative()
    first, check = model.stitch.body.anchors.clone(), AnchorCheck(model)
    trainer = trained(tmp_path, model, check, max_steps=24, eval_strategy="steps", eval_steps=7)
    assert check.equal == [True, True, True, True]
    assert torch.equal(model.stitch.body.anchors, embedded(model))
    assert not torch.allclose(model.stitch.body.anchors, first)
    assert trainer.evaluate()["eval_loss"] < 0.5


def test_evaluation_frequency_does_not_change_training(tmp_path: Path) -> None:
    often, never = relative(), relative()
    trained(tmp_path, often, max_steps=10, eval_strategy="steps", eval_steps=1)
    trained(tmp_path, never, max_steps=10, eval_strategy="no")
    for name, value in often.state_dict().items():
        assert torch.equal(value, never.state_dict()[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anchors": X[:9]}, "has 10 anchors, got 9"),
        ({"every": 0}, "every must be an integer >= 1"),
        ({"encoder": None}, "pass encoder="),
        ({"model": nn.Linear(2, 2)}, "Linear contains 0 relative projections"),
    ],
)
def test_invalid_arguments_raise(options: dict[str, Any], message: str) -> None:
    model = network()
    with pytest.raises(ValueError, match=message):
        AnchorRefresh(**{"model": model, "anchors": X[:10], "encoder": model[0], **options})
