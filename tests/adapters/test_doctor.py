"""The doctor: the report depends on the stage that failed."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import made_up
import pytest
import torch
import transformers as hf
from families import BERT, VIT
from rich.console import Console
from torch import Tensor, nn

import hf_stitch
from hf_stitch.adapters.doctor import Diagnosis, diagnose

X = torch.randn(2, 4)


def rendered(found: Diagnosis) -> str:
    """Return the report as text."""
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(found)
    return captured.get()


class Net(nn.Module):
    """Three blocks; subclasses change how the output is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))

    def forward(self, x: Tensor) -> Any:
        return self.blocks(x) * 2


BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


def test_the_report_contains_the_cuts() -> None:
    found = diagnose(Net(), example_inputs=X)
    assert (found.cuts, found.failed, found.tried, found.tried_by) == (BLOCKS, "", ("x 2×4",), "example_inputs")
    assert "3 of 3 candidates are cuts" in rendered(found)


def test_missing_inputs_are_not_reported_as_a_failed_load() -> None:
    found = diagnose(Net())
    assert (found.failed, found.kind) == ("inputs", "Net")
    assert "could not be loaded" not in rendered(found)
    assert "example_inputs={name: tensor}" in found.advice[0]


@pytest.mark.parametrize("option", [{"content": "y"}, {"example_inputs": 3}])
def test_wrong_options_of_the_user_get_no_advice(option: dict[str, Any]) -> None:
    found = diagnose(Net(), **{"example_inputs": X, **option})
    assert (found.failed, found.advice) == ("inputs", ())


def test_a_loading_error_gives_no_advice_about_inputs(tmp_path: Path) -> None:
    hf.BertConfig(**BERT).save_pretrained(tmp_path)
    found = diagnose(str(tmp_path), wrong=3)
    assert found.failed == "loading"
    assert not any("inputs" in line for line in found.advice)


def test_a_forward_that_requires_several_inputs(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = hf.VideoMAEConfig(**small, image_size=32, patch_size=8, num_frames=4)
    hf.VideoMAEForPreTraining(config).save_pretrained(tmp_path)
    found = diagnose(str(tmp_path))
    assert (found.failed, found.tried_by) == ("forward", "made up")
    assert "example_inputs={name: tensor}" in found.advice[0]


def test_a_forward_that_fails_on_example_inputs() -> None:
    found = diagnose(Net(), example_inputs=torch.randn(2, 3))
    assert found.failed == "forward"
    assert "they come from example_inputs" in found.advice[0]


def test_a_forward_that_fails_on_inputs_of_an_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_up.ForMadeUp, "example", lambda self, model: {"x": torch.randn(2, 3)})
    found = diagnose(made_up.MadeUp())
    assert found.advice == ("Correct these inputs: they come from the override ForMadeUp.",)


def test_advice_for_a_head_without_cuts_on_a_body_with_cuts() -> None:
    model = hf.BertForMultipleChoice(hf.BertConfig(**BERT)).eval()
    found = diagnose(model)
    assert found.failed == "forward"
    layers = hf_stitch.load(model.bert).layers
    assert (
        f"{len(layers)} cuts, {layers[0]} to {layers[-1]}: load it with hf_stitch.load(adapter.model.bert)"
        in " ".join(found.advice)
    )


def test_an_output_of_unknown_type() -> None:
    class Opaque(Net):
        def forward(self, x: Tensor) -> Any:
            return object()

    found = diagnose(Opaque(), example_inputs=X)
    assert (found.failed, found.advice) == ("survey", ())
    assert "in a module that returns tensors" in found.error


def test_one_of_several_outputs_can_be_cut() -> None:
    class TwoOutputs(Net):
        def forward(self, x: Tensor) -> Any:
            return {"mean": x.mean(1), "y": self.blocks(x) * 2}

    found = diagnose(TwoOutputs(), example_inputs=X)
    assert found.cuts == ()
    assert f"For output['y'] alone, the candidates are {', '.join(BLOCKS)}" in found.advice[-1]


def test_a_module_without_submodules() -> None:
    (line,) = diagnose(nn.Linear(4, 4), example_inputs=X).advice
    assert "has no modules inside" in line


def test_an_end_of_text_that_the_config_does_not_define() -> None:
    class Ending(hf.BertForSequenceClassification):
        """Pools the hidden state at the largest id."""

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:  # type: ignore[override]
            hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return self.classifier(hidden[torch.arange(len(hidden)), input_ids.argmax(1)])

    found = diagnose(Ending(hf.BertConfig(**BERT)).eval())
    assert found.cuts == ()
    assert "reads the token ids themselves" in found.advice[0]
    assert rendered(found).count("depends on the input by another way") == 1


def test_cuts_that_are_not_blocks_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_up.ForMadeUp, "blocks", lambda self, model: ("branch",))
    found = diagnose(made_up.MadeUp())
    assert "first, second" in found.advice[-1]
    assert "the override ForMadeUp" in found.advice[-1]


def test_modules_that_an_override_could_name_are_listed() -> None:
    class Bypassed(Net):
        """Blocks with a bypass that is invisible to autograd."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Any:
            first = self.stem(x)
            return self.norm(self.blocks(first) + first.detach()) * 2

    found = diagnose(Bypassed(), example_inputs=X)
    assert found.cuts == ()
    assert "These modules are cuts too, but not blocks: stem, norm" in found.advice[-1]


def test_advice_about_the_decoder_of_an_encoder_decoder() -> None:
    config = hf.T5Config(
        d_model=16, num_layers=2, num_heads=2, d_ff=16, d_kv=8, vocab_size=50, decoder_start_token_id=0
    )
    model = hf.T5ForConditionalGeneration(config).eval()
    assert "--content decoder_input_ids" in diagnose(model).advice[0]
    assert diagnose(model, content="decoder_input_ids").cuts == ("decoder.block.0", "decoder.block.1")


def test_warnings_are_notes(tmp_path: Path) -> None:
    hf.ViTForImageClassification(hf.ViTConfig(**VIT)).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (note,) = diagnose(str(tmp_path)).notes
    assert "has no ImageProcessor" in note


def test_the_padding_of_texts_is_a_row() -> None:
    found = diagnose(hf.BertForSequenceClassification(hf.BertConfig(**BERT)).eval())
    assert found.padding == "right" and "padding right" in rendered(found)
    assert not diagnose(Net(), example_inputs=X).padding
