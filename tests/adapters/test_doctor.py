"""The doctor: the report depends on the stage that failed."""

from __future__ import annotations

import io
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_up
import pytest
import torch
import transformers as hf
from families import BERT, VIT
from rich.console import Console
from torch import Tensor, nn

from hf_stitch.adapters.doctor import Diagnosis, diagnose

X = torch.randn(2, 4)


def rendered(found: Diagnosis) -> str:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(found)
    return captured.get()


class Net(nn.Module):
    """Three blocks; ``after`` receives the network, its input and the output of the blocks."""

    def __init__(self, after: Callable[..., Any] = lambda net, x, y: y * 2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        self.after = after

    def forward(self, x: Tensor) -> Any:
        return self.after(self, x, self.blocks(x))


class Bypassed(nn.Sequential):
    """Blocks with a bypass that is invisible to autograd."""

    def forward(self, x: Tensor) -> Any:
        first = self.stem(x)
        return self.norm(self.blocks(first) + first.detach()) * 2


class Ending(hf.BertForSequenceClassification):
    """Pools the hidden state at the largest id."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:  # type: ignore[override]
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.classifier(hidden[torch.arange(len(hidden)), input_ids.argmax(1)])


def bypassed() -> nn.Module:
    return Bypassed(OrderedDict(stem=nn.Linear(4, 4), blocks=Net().blocks, norm=nn.LayerNorm(4)))


def parallel() -> nn.Module:
    return Net(lambda net, x, y: net.blocks[0](x) * net.blocks[1](x))


def saved(folder: Path, model: Any) -> str:
    model.save_pretrained(folder)
    return str(folder)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
VIDEO = hf.VideoMAEConfig(**SMALL, image_size=32, patch_size=8, num_frames=4)
T5 = hf.T5Config(d_model=16, num_layers=2, num_heads=2, d_ff=16, d_kv=8, vocab_size=50, decoder_start_token_id=0)
GIVEN = {"example_inputs": X}
FAILING: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str, str]] = {
    "no inputs": (lambda folder: Net(), {}, "inputs", "example_inputs={name: tensor}"),
    "a wrong name": (lambda folder: Net(), {**GIVEN, "content": "y"}, "inputs", ""),
    "a number": (lambda folder: Net(), {"example_inputs": 3}, "inputs", ""),
    "an option": (lambda folder: saved(folder, hf.BertConfig(**BERT)), {"wrong": 3}, "loading", "-inputs"),
    "several inputs": (
        lambda folder: saved(folder, hf.VideoMAEForPreTraining(VIDEO)), {}, "forward", "example_inputs={name: tensor}",
    ),
    "inputs of the user": (
        lambda folder: Net(), {"example_inputs": torch.randn(2, 3)}, "forward", "they come from example_inputs",
    ),
    "an unknown class": (lambda folder: Net(lambda *_: object()), GIVEN, "survey", ""),
    "several outputs": (
        lambda folder: Net(lambda net, x, y: {"mean": x.mean(1), "y": y * 2}), GIVEN, "",
        "For output['y'] alone, the candidates are blocks.0, blocks.1, blocks.2",
    ),
    "no modules": (lambda folder: nn.Linear(4, 4), GIVEN, "", "does not contain modules"),
    "parallel paths": (lambda folder: parallel(), GIVEN, "", "parallel paths"),
    "a bypass": (lambda folder: bypassed(), GIVEN, "", "These modules are also cuts, but not blocks: stem, norm"),
    "an end of text that the config lacks": (
        lambda folder: Ending(hf.BertConfig(**BERT)).eval(), {}, "", "reads the token ids",
    ),
    "a head without cuts": (
        lambda folder: hf.BertForMultipleChoice(hf.BertConfig(**BERT)).eval(), {}, "forward",
        "3 cuts, encoder.layer.0 to encoder.layer.2: load it with hf_stitch.load(adapter.model.bert)",
    ),
}  # fmt: skip
"""What is wrong -> network, options, the stage that fails, and advice; ``""`` if there is none."""


@pytest.mark.parametrize("case", FAILING)
def test_the_report_depends_on_the_stage_that_failed(case: str, tmp_path: Path) -> None:
    make, options, stage, advice = FAILING[case]
    found = diagnose(make(tmp_path), **options)
    assert (found.failed, found.cuts) == (stage, ())
    if advice.startswith("-"):
        assert not any(advice[1:] in line for line in found.advice)
    else:
        assert advice in " ".join(found.advice) and (advice or not found.advice)
    assert "could not be loaded" not in rendered(found) or stage == "loading"
    assert rendered(found).count("depends on the input through other paths") <= 1


def test_the_report_contains_the_cuts_and_the_padding_of_texts() -> None:
    found = diagnose(Net(), example_inputs=X)
    assert found.cuts == ("blocks.0", "blocks.1", "blocks.2")
    assert (found.failed, found.kind, found.tried, found.tried_by) == ("", "Net", ("x 2×4",), "example_inputs")
    assert "3 of 3 candidates are cuts" in rendered(found) and not found.padding
    texts = diagnose(hf.BertForSequenceClassification(hf.BertConfig(**BERT)).eval())
    assert texts.padding == "right" and "padding right" in rendered(texts)


def test_inputs_and_blocks_of_an_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_up.ForMadeUp, "blocks", lambda self, model: ("branch",))
    advice = diagnose(made_up.MadeUp()).advice[-1]
    assert "first, second" in advice and "the override ForMadeUp" in advice
    monkeypatch.setattr(made_up.ForMadeUp, "example", lambda self, model: {"x": torch.randn(2, 3)})
    assert diagnose(made_up.MadeUp()).advice == ("Correct these inputs: they come from the override ForMadeUp.",)


def test_advice_about_the_decoder_of_an_encoder_decoder() -> None:
    model = hf.T5ForConditionalGeneration(T5).eval()
    assert "--content decoder_input_ids" in diagnose(model).advice[0]
    assert diagnose(model, content="decoder_input_ids").cuts == ("decoder.block.0", "decoder.block.1")


def test_warnings_are_notes(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (note,) = diagnose(saved(tmp_path, hf.ViTForImageClassification(hf.ViTConfig(**VIT)))).notes
    assert "does not contain a usable ImageProcessor" in note
