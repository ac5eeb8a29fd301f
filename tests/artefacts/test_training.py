"""Training of stitched models with the Trainer of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from processes import run_ranks
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_stitch import StitchedModel

from tiny_networks import LAYERS, build, checkpointed, network, plain_tokenizer, stitched  # isort: skip


def trainer(model: Any, images: Any, folder: Path, **options: Any) -> transformers.Trainer:
    data = [{"pixel_values": sample["image"], "labels": sample["label"]} for sample in images[:24]]
    defaults: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 8, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "report_to": [], "disable_tqdm": True, "use_cpu": True,
        "seed": 0,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(folder), **{**defaults, **options})
    return transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])


def test_frozen_networks_do_not_change_in_training(images: Any, tmp_path: Path, cnn_vit: StitchedModel) -> None:
    """Weights of the halves and statistics of BatchNorm stay bitwise the same."""
    model = cnn_vit.freeze_networks()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer(model, images, tmp_path).train()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.startswith("stitch.") and "mean" not in name for name in changed)


@pytest.mark.parametrize("frozen", [False, True])
def test_resuming_gives_the_same_weights(frozen: bool, images: Any, tmp_path: Path, cnn_vit: StitchedModel) -> None:
    def fresh() -> StitchedModel:
        return copy.deepcopy(cnn_vit).freeze_networks() if frozen else copy.deepcopy(cnn_vit)

    whole, first, second = fresh(), fresh(), fresh()
    trainer(whole, images, tmp_path / "whole").train()
    trainer(first, images, tmp_path / "parts", max_steps=2).train()
    trainer(second, images, tmp_path / "parts").train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    expected = whole.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in second.state_dict().items())


def test_the_best_checkpoint_is_loaded_at_the_end(images: Any, tmp_path: Path, cnn_vit: StitchedModel) -> None:
    model = cnn_vit
    run = trainer(
        model, images, tmp_path, load_best_model_at_end=True, metric_for_best_model="eval_loss", learning_rate=1.0
    )
    run.train()
    kept = StitchedModel.from_pretrained(Path(run.state.best_model_checkpoint or "")).state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert run.evaluate()["eval_loss"] == pytest.approx(run.state.best_metric)


@pytest.mark.parametrize(
    ("pair", "frozen"),
    [
        (("gpt2", "llama"), False),
        *((pair, True) for pair in (("bert", "bert"), ("t5", "roberta"), ("bert", "llama"))),
    ],
)
def test_checkpointing_gives_the_same_gradients(pair: tuple[str, str], frozen: bool, texts: Any, inputs: Any) -> None:
    a, b, pooling = network(pair[0]), network(pair[1], 1), "mean" if pair[1] == "roberta" else "none"
    model = stitched(a, b, texts, (LAYERS[pair[0]], LAYERS[pair[1]]), pooling=pooling)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model, batch = (model.freeze_networks() if frozen else model).train(), inputs(a)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**batch).logits.square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    torch.testing.assert_close(gradients(), expected)
    checkpointed(model)
    assert sum(isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing for m in model.modules()) > 1
    torch.testing.assert_close(gradients(), expected)

    if pair == ("gpt2", "llama"):  # a config of an older version asks for it
        model.config.gradient_checkpointing = True
        assert any(getattr(module, "gradient_checkpointing", False) for module in type(model)(model.config).modules())


def test_images_need_gradients_but_no_checkpointing_where_a_half_lacks_it(cnn_vit: StitchedModel, images: Any) -> None:
    with pytest.raises(ValueError, match="StitchedModelForImageClassification does not support"):
        checkpointed(cnn_vit)
    cnn_vit.requires_grad_(False).enable_input_require_grads()
    assert cnn_vit(pixel_values=images[0]["image"][None]).logits.requires_grad


def train_in_two(rank: int, folder: Path) -> None:
    model = StitchedModel.from_pretrained(folder / "model").freeze_networks()
    run = trainer(model, random_images(), folder / "run", per_device_train_batch_size=4, ddp_backend="gloo")
    run.train()
    assert run.args.world_size == 2
    run.save_model(str(folder / "trained"))


def random_images() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    return [{"image": torch.randn(3, 32, 32, generator=draw), "label": i % 5} for i in range(24)]


def test_two_processes(tmp_path: Path, cnn_vit: StitchedModel) -> None:
    """Two processes take the same steps as one process with twice the batch size."""
    model = cnn_vit
    model.save_pretrained(tmp_path / "model")
    trainer(model.freeze_networks(), random_images(), tmp_path / "alone").train()
    run_ranks(2, train_in_two, tmp_path)
    trained = StitchedModel.from_pretrained(tmp_path / "trained")
    torch.testing.assert_close(trained.stitch.body.weight, model.stitch.body.weight, rtol=1e-3, atol=1e-4)


def losses(model: Any, texts: Any, folder: Path, size: int) -> list[float]:
    """Evaluate, train on 8 texts a step in batches of one size, and return losses and norms of gradients."""
    ids = [{"input_ids": plain_tokenizer()(sample["text"])["input_ids"]} for sample in texts[:16]]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size,
        logging_steps=1, learning_rate=1e-3, report_to=[], disable_tqdm=True, use_cpu=True, seed=0,
    )  # fmt: skip
    collator = transformers.DataCollatorForLanguageModeling(plain_tokenizer(), mlm=False)
    run = transformers.Trainer(model, arguments, train_dataset=ids, eval_dataset=ids[:8], data_collator=collator)
    evaluated = run.evaluate()["eval_loss"]
    run.train()
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    return [evaluated, *(entry[key] for entry in logged for key in ("loss", "grad_norm"))]


def test_a_trainer_computes_the_losses_of_an_ordinary_language_model(texts: Any, tmp_path: Path) -> None:
    """Transformers looks for arguments with "label" in their names, and computes no loss if a batch lacks one."""
    layer, adapter = LAYERS["llama"], network("llama")
    model = stitched(adapter, adapter, texts, (layer, layer), matcher="identity")
    expected = losses(build("llama", 0), texts, tmp_path / "plain", 2)
    for size in (2, 8):
        found = losses(copy.deepcopy(model), texts, tmp_path / str(size), size)
        assert found[0] == pytest.approx(expected[0])
        assert found == pytest.approx(expected, rel=1e-3)  # the log rounds
