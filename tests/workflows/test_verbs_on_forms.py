"""Every verb gives for each form of a network what it gives for the plain one, or refuses the form by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_stitch
from hf_stitch import StitchedModel, Stitcher
from hf_stitch.analysis import extract_activations

from forms import FORMS, ROUNDED, layer_in, load_form, loaded  # isort: skip
from tiny_networks import LAYERS  # isort: skip

BERT, TASK = LAYERS["bert"], "text-classification"
FEW: dict[str, Any] = {"resamples": 10, "progress": False}
Numbers = Mapping[str, Any]


def stitched(a: Any, b: Any, texts: Any) -> StitchedModel:
    model: StitchedModel = hf_stitch.stitch(
        a, b, texts[:60], source_layer=layer_in(a, BERT), target_layer=layer_in(b, BERT), matcher="ridge", ridge=1.0,
        task=TASK, test_data=texts[60:], progress=False,
    )  # fmt: skip
    return model


@cache
def plain() -> hf_stitch.Adapter:
    """The other network of each pair."""
    return load_form("bert", "plain", 1)


def logits(model: StitchedModel, texts: Any) -> Numbers:
    with torch.no_grad():
        return {"logits": model(**model.preprocess([sample["text"] for sample in texts[:5]])).logits}


def figures(evaluation: hf_stitch.Evaluation) -> Numbers:
    """The figures of all predictors but the source, whose head is unknown if user code wraps it."""
    return {f"{who} {name}": score.value for who, row in evaluation.scores.items() if who != "source"
            for name, score in row.items()}  # fmt: skip


def stitch(form: str, texts: Any, folder: Path) -> Numbers:
    model = stitched(loaded("bert", form), plain(), texts)
    return {**logits(model, texts), **figures(model.evaluation)}


def stitch_as_target(form: str, texts: Any, folder: Path) -> Numbers:
    model = stitched(plain(), loaded("bert", form), texts)
    return {**logits(model, texts), **figures(hf_stitch.evaluate(model, texts[60:], **FEW))}


def stitch_grid(form: str, texts: Any, folder: Path) -> Numbers:
    a = loaded("bert", form)
    grid = hf_stitch.stitch_grid(
        a, plain(), texts, layers_a=[layer_in(a, BERT)], layers_b=[BERT], matchers=["ridge"], task=TASK, **FEW
    )
    return {f"{who} {name}": values for part in (grid.scores, grid.baselines) for who, row in part.items()
            if who != "source" for name, values in row.items()}  # fmt: skip


def audit(form: str, texts: Any, folder: Path) -> Numbers:
    model = stitched(plain(), loaded("bert", form), texts)
    return figures(hf_stitch.audit(model, texts[60:], detectors=["knn"], **FEW).evaluation)


def extract(form: str, texts: Any, folder: Path) -> Numbers:
    a = loaded("bert", form)
    found = extract_activations(a, texts, layers=[layer_in(a, BERT)], progress=False)
    return {"values": found.values[layer_in(a, BERT)]}


def save(form: str, texts: Any, folder: Path) -> Numbers:
    model = stitched(loaded("bert", form), plain(), texts)
    model.save_pretrained(folder)
    again = logits(StitchedModel.from_pretrained(folder), texts)
    assert torch.equal(again["logits"], logits(model, texts)["logits"])
    return again


def save_the_stitcher(form: str, texts: Any, folder: Path) -> Numbers:
    stitched(loaded("bert", form), plain(), texts).stitcher.save_pretrained(folder)
    return logits(Stitcher.from_pretrained(folder).attach(load_form("bert", form), plain()), texts)


VERBS: tuple[Callable[..., Numbers], ...] = (
    stitch, stitch_as_target, stitch_grid, audit, extract, save, save_the_stitcher
)  # fmt: skip
HOOK = r"has a hook .* remove it \(torch.nn.utils.prune.remove\)"
REFUSED = {
    **{(verb, "pruned"): HOOK for verb in VERBS if verb not in (extract, stitch_grid)},
    (save, "weight-norm"): "its networks were changed by hand",
    (save, "wrapped"): "Wrapper is a class of user code",
    (save, "lora"): "Wrapper is a class of user code",
    (save, "int8"): r"its networks were changed by hand.*Linear', now 'torch.ao",
    (save, "peft"): "with an adapter of PEFT inside: merge it into its network",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", [form for form in FORMS if form != "plain"])
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_a_form_gives_what_the_plain_network_gives(
    verb: Callable[..., Numbers], form: str, texts: Any, tmp_path: Path
) -> None:
    expected = _of_plain(verb, texts, tmp_path / "plain")
    if message := REFUSED.get((verb, form)):
        with pytest.raises(ValueError, match=message):
            verb(form, texts, tmp_path / form)
        return
    found = verb(form, texts, tmp_path / form)
    assert found.keys() == expected.keys()
    tolerance = 2e-2 if form in ROUNDED else 1e-5
    for name, values in expected.items():
        pair = (torch.as_tensor(each, dtype=torch.float64) for each in (found[name], values))
        torch.testing.assert_close(*pair, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


ROWS = {
    "adapters of [PEFT](lora.md), live": "peft", "bfloat16, float16": "bf16",
    "`torch.compile`, `DataParallel`": "compiled",
    "a wrapper `forward(*args, **kwargs)` of user code": "wrapped", "`torch.nn.utils.prune`": "pruned",
    "`torch.nn.utils.parametrizations` (weight norm, orthogonal, …)": "weight-norm",
    "offloaded by accelerate": "offloaded", "`torch.ao.quantization.quantize_dynamic`": "int8",
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_the_page_of_forms_tells_what_is_refused(row: str) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/forms.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {row} |")]
    told = [cell.strip().startswith("no") for cell in line.split("|")[3:5]]
    assert told == [(verb, ROWS[row]) in REFUSED for verb in (stitch, save)]


KNOWN: dict[Callable[..., Numbers], Numbers] = {}


def _of_plain(verb: Callable[..., Numbers], texts: Any, folder: Path) -> Numbers:
    if verb not in KNOWN:
        KNOWN[verb] = verb("plain", texts, folder)
    return KNOWN[verb]
