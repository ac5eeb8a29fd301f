"""Adapters of PEFT on stitched models: trained, saved, loaded, merged, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from hf_stitch import StitchedModel

from tiny_networks import checkpointed  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning:transformers")  # what PEFT calls
QUERIES = ["query", "q_proj", "c_attn"]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": QUERIES, **options})


def output(model: Any, given: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found = model.eval()(**given)
    values: Tensor = found.logits if hasattr(found, "logits") else found.last_hidden_state
    return values


def train(model: Any, given: dict[str, Tensor], steps: int = 5) -> list[float]:
    """Train what PEFT trains; each of its weights gets a gradient."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(weights.values(), 1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        found = model.train()(**given)
        loss = found.loss if "labels" in given else found.last_hidden_state[..., 0].square().mean()
        loss.backward()
        assert [name for name, weight in weights.items() if weight.grad is None] == []
        optimizer.step()
        losses.append(loss.item())
    return losses


ADAPTERS: dict[str, tuple[str, Any]] = {
    "SEQ_CLS": ("roberta-bert", lora(task_type="SEQ_CLS")),
    "SEQ_CLS, all linear": ("bert-bert", lora(task_type="SEQ_CLS", target_modules="all-linear")),
    "TOKEN_CLS": ("tokens", lora(task_type="TOKEN_CLS")),
    "FEATURE_EXTRACTION": ("features", lora(task_type="FEATURE_EXTRACTION")),
    "CAUSAL_LM": ("gpt2-llama", lora(task_type="CAUSAL_LM", target_modules="all-linear")),
    "images": ("image", lora(target_modules="all-linear", modules_to_save=["classifier"])),
    "the stitch": ("image", lora(target_modules=["stitch.body"])),
    "the stitch, whole": ("bert-bert", lora(modules_to_save=["stitch"])),
    "DoRA": ("gpt2-llama", lora(task_type="CAUSAL_LM", use_dora=True)),
    "IA3": ("gpt2-llama", peft.IA3Config(task_type="CAUSAL_LM", target_modules=QUERIES, feedforward_modules=[])),
    "prompts": ("gpt2-llama", peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, token_dim=24)),
    "prompts of an encoder": ("bert-bert", peft.PromptEncoderConfig(task_type="SEQ_CLS", num_virtual_tokens=3)),
    "prefixes": ("gpt2-gpt2", peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
    "prefixes, fewer keys": (
        "llama-llama",
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, token_dim=16, num_attention_heads=2),
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_trained_saved_loaded_and_merged(name: str, headed: Any, tmp_path: Path) -> None:
    kind, config = ADAPTERS[name]
    model, given = headed(kind)
    plain = output(model, given)
    model.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(model, config)
    losses = train(adapted, given)
    assert losses[-1] < losses[0]
    expected = output(adapted, given)
    assert not torch.equal(expected, plain)
    if not (config.is_prompt_learning and config.task_type == "SEQ_CLS"):  # which PEFT cannot switch off
        with adapted.disable_adapter():
            assert torch.equal(output(adapted, given), plain)
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(StitchedModel.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(output(again, given), expected)
    if not config.is_prompt_learning:
        with pytest.raises(ValueError, match="with a PEFT adapter: merge it"):
            model.save_pretrained(tmp_path / "whole")
        if name == "the stitch":
            with pytest.raises(ValueError, match="the stitch has a PEFT adapter"):
                _ = model.stitcher
        merged = again.merge_and_unload()
        torch.testing.assert_close(output(merged, given), expected, rtol=1e-4, atol=1e-5)
        merged.save_pretrained(tmp_path / "merged")
        assert torch.equal(output(StitchedModel.from_pretrained(tmp_path / "merged"), given), output(merged, given))


REFUSED: dict[str, tuple[Any, str]] = {
    "a layer of the target before its cut": (
        lora(target_modules=["target.model.bert.encoder.layer.0.attention.self.query"]),
        "Target modules .* not found",
    ),
    "the head of the source": (lora(target_modules=["classifier"]), "in place of 'classifier', which does not run in"),
    "the head of the source, whole": (
        lora(modules_to_save=["source.model.classifier"]),
        "modules_to_save contains classifier, which does not run in this model",
    ),
    "no modules": (lora(target_modules=None), "specify `target_modules`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_train_nothing_is_refused(name: str, headed: Any) -> None:
    config, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        peft.get_peft_model(headed("bert-bert")[0], config).train()


@pytest.mark.parametrize(("kind", "message"), [("gpt2-llama", "not found"), ("roberta-bert", "missing adapter keys")])
def test_an_adapter_of_another_base_is_noticed(kind: str, message: str, headed: Any, tmp_path: Path) -> None:
    peft.get_peft_model(headed("bert-bert")[0], lora(target_modules=["query"])).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=message) if "missing" in message else pytest.raises(ValueError, match=message):
        peft.PeftModel.from_pretrained(headed(kind)[0], tmp_path)


def test_gradient_checkpointing_gives_the_gradients_of_an_adapter(headed: Any) -> None:
    model, given = headed("gpt2-llama")

    def gradients() -> dict[str, Tensor]:
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, lora(lora_dropout=0.0)).eval()
        adapted(**given).loss.backward()
        found = {name: weight.grad.clone() for name, weight in adapted.named_parameters() if weight.grad is not None}
        adapted.unload()
        return found

    expected = gradients()
    model.enable_input_require_grads()
    found = gradients()
    checkpointed(model)
    assert expected.keys() == found.keys() == gradients().keys()
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, expected[name])
