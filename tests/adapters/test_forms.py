"""Forms of one network: whatever wraps it or holds its weights, inputs arrive and the numbers are the same."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import hf_stitch_versions as versions
import pytest
import torch
import transformers
from forms import EXACT, FORMS, OWN, REFUSED, ROUNDED, Wrapper, adapter_of, form_of, layer_in, load_form, loaded, twin
from tiny_networks import LANGUAGE, LAYERS, SIZE, WORDS, build, plain_tokenizer
from torch import Tensor, nn

import hf_stitch
from hf_stitch import Adapter, StitchedModel, Stitcher
from hf_stitch.adapters.examples import ExampleError
from hf_stitch.adapters.loading import unwrap
from hf_stitch.analysis import Evaluation
from hf_stitch.reference import weights_hash

BERT = LAYERS["bert"]
IDS = torch.arange(4, 16).reshape(2, 6)
FEW: dict[str, Any] = {"resamples": 10, "progress": False}

ELSEWHERE = {
    "llama": ("wrapped", "peft of zeros", "peft", "half pruned", "orthogonal", "tensor subclass", "int8", "offloaded"),
    "vit": ("compiled in place", "layer of integers"),
    "cnn": ("weight norm", "old spectral norm"),
}
"""Forms of a decoder and of networks of images; all others are those of an encoder."""

CASES = [
    *(("bert", form) for form in FORMS if not any(form in forms for forms in ELSEWHERE.values())),
    ("bert", "peft"),
    *((family, form) for family, forms in ELSEWHERE.items() for form in forms),
]  # fmt: skip

ROWS = {
    "plain": "plain, also with weights rounded or merged by hand",
    **dict.fromkeys(("bf16", "fp16"), "bfloat16, float16"),
    **dict.fromkeys(("peft", "peft of zeros", "peft of another kind"), "adapters of [PEFT](lora.md), not merged"),
    "peft-merged": "adapters of PEFT, merged",
    "lora": "a custom LoRA",
    "wrapped": "a custom wrapper `forward(*args, **kwargs)`",
    **dict.fromkeys(("compiled", "compiled in place"), "`torch.compile(network)`, `network.compile()`"),
    "parallel": "`DataParallel`, DDP",
    **dict.fromkeys(("offloaded", "on disk"), "offloaded by accelerate, to memory or disk"),
    "half pruned": "`torch.nn.utils.prune`",
    **dict.fromkeys(("weight norm", "spectral norm", "orthogonal"), "`torch.nn.utils.parametrizations`"),
    **dict.fromkeys(("old weight norm", "old spectral norm"), "`torch.nn.utils.weight_norm`, `.spectral_norm`"),
    "int8": "`torch.ao.quantization.quantize_dynamic`",
    "tensor subclass": "weights in a tensor class (torchao, weights only)",
    "layer of integers": "integer layers (bitsandbytes)",
    "prompts": "prompts of PEFT (prompt, prefix and p-tuning)",
    "compiled block": "`network.block = torch.compile(block)`",
    **dict.fromkeys(("TorchScript", "TorchScript inside"), "TorchScript, also of a module inside"),
    "exported": "`torch.export`",
    "on meta": "weights on the meta device",
    "sharded": "sharded (FSDP, tensor parallelism, ZeRO)",
}
"""Form -> its row on the page."""

PAGE = Path(__file__).parents[2] / "docs/how-to/forms.md"


@cache
def table() -> dict[str, dict[str, str]]:
    """Return the table of the page: row -> column -> cell."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    head, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def way_out(form: str, column: str) -> str:
    """Return the way out that the page names where a form is refused; empty where it is taken."""
    cell = table()[ROWS[form]][column]
    assert cell == "yes" or (cell.startswith("no: `") and cell.endswith("`")), cell
    return cell[5:-1] if cell != "yes" else ""


def test_the_page_has_a_row_for_every_form_and_a_form_for_every_row() -> None:
    assert {*FORMS, *REFUSED} == ROWS.keys() and {form for _, form in CASES} == {*FORMS}
    assert set(ROWS.values()) == table().keys()


@pytest.mark.parametrize("form", REFUSED)
def test_a_form_is_refused_when_it_is_loaded_with_the_way_out_of_the_page(form: str) -> None:
    with pytest.raises(ValueError, match=re.escape(way_out(form, "load, compare"))):
        load_form("bert", form)
    assert {cell for column, cell in table()[ROWS[form]].items() if column != "load, compare"} == {""}


@cache
def loaded_twin(family: str, form: str, seed: int = 0) -> Adapter:
    if form not in OWN and form != "plain":
        return loaded_twin(family, "plain", seed)
    return adapter_of(family, twin(family, form, seed))


def data_of(family: str) -> list[Any]:
    if family in LANGUAGE:
        draw = random.Random(0)
        return [" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(24)]
    return list(torch.randn(24, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1)))


def stitched(a: Adapter, b: Adapter, family: str) -> StitchedModel:
    layer, data = LAYERS[family], data_of(family)
    model: StitchedModel = hf_stitch.stitch(
        a, b, data[:16], source_layer=layer_in(a, layer), target_layer=layer_in(b, layer), test_data=data[16:],
        task=None, progress=False, matcher="ridge", ridge=1.0,
    )  # fmt: skip
    return model


def partner(family: str) -> Adapter:
    return loaded_twin(family, "plain", 1)


@cache
def joined(family: str, form: str, source: bool) -> StitchedModel:
    """A form as source or target, and the other network."""
    pair = (loaded(family, form), partner(family))
    return stitched(*(pair if source else pair[::-1]), family)


@cache
def joined_twin(family: str, form: str, source: bool) -> StitchedModel:
    if form not in OWN:
        return joined(family, "plain", source)
    pair = (loaded_twin(family, form), partner(family))
    return stitched(*(pair if source else pair[::-1]), family)


def scores(evaluation: Evaluation) -> dict[str, float]:
    """The scores that are defined on few samples."""
    found = {name: score.value for name, score in evaluation.scores["stitched"].items()}
    return {name: value for name, value in found.items() if not math.isnan(value)}


@torch.no_grad()
def logits(model: Any, family: str) -> Tensor:
    given = model.preprocess(data_of(family)[:5])
    output = model.forward(given) if isinstance(model, Adapter) else model(**given)
    found: Tensor = getattr(output, "logits", output)
    return found


def close(form: str, found: Any, expected: Any) -> None:
    """Compare numbers of a form with those of its twin: bits, or up to the rounding of its dtype."""
    found, expected = (torch.as_tensor(each).double() for each in (found, expected))
    tolerance = 0.0 if form in EXACT else 2e-2 if form in ROUNDED else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def cut(family: str, form: str, folder: Path, inputs: Any) -> None:
    """Layers and activations are those of the twin, and a cut is exact."""
    plain, other = loaded_twin(family, form), loaded(family, form)
    assert other.layers == tuple(layer_in(other, layer) for layer in plain.layers)
    layer = layer_in(other, LAYERS[family])
    for padding in ("left", "right"):
        expected = plain.encode(inputs(plain, padding), LAYERS[family])[LAYERS[family]]
        given = inputs(other, padding)
        found = other.encode(given, layer)[layer]
        rows: Any = ...
        if family in LANGUAGE:
            rows = found.mask
            assert rows is not None and not bool(rows.all()) and torch.equal(rows, expected.mask)
        close(form, found.values[rows], expected.values[rows])
        whole, halves = other.forward(given), other.decode(found, layer)
        assert torch.equal(getattr(halves, "logits", halves), getattr(whole, "logits", whole))


def hashed(family: str, form: str, folder: Path, inputs: Any) -> None:
    """The hash is that of the weights: the same of a form built again, another of other weights."""
    known = loaded(family, form).pinned.weights_hash
    again, other = (weights_hash(unwrap(form_of(family, form, seed))) for seed in (0, 1))
    assert known == again != other


def compare(family: str, form: str, folder: Path, inputs: Any) -> None:
    """Networks are compared; where all bits are those of the twin, :func:`cut` shows it, and one form suffices."""
    a, b = loaded_twin(family, form), loaded(family, form)
    found = hf_stitch.compare(a, b, data_of(family), metrics=["direct_matching"], progress=False)
    diagonal = torch.as_tensor(found["direct_matching"]).diagonal()
    assert float(diagonal.max()) <= (0 if form in EXACT else 1e-3 if form in ROUNDED else 1e-9)


def stitch(family: str, form: str, folder: Path, inputs: Any) -> None:
    """Halves join to the network; a fitted stitch gives the outputs and scores that the twin gives, on both sides."""
    other = loaded(family, form)
    given, layer = inputs(other), layer_in(other, LAYERS[family])
    with torch.no_grad():
        whole, halves = other.forward(given), other.back(layer)(other.front(layer)(**given))
    assert torch.equal(getattr(halves, "logits", halves), getattr(whole, "logits", whole))
    for source in (True, False):
        model, expected = joined(family, form, source), joined_twin(family, form, source)
        close(form, logits(model, family), logits(expected, family))
        found, known = scores(model.evaluation), scores(expected.evaluation)
        assert found.keys() == known.keys()
        close(form, list(found.values()), list(known.values()))
    assert found and scores(hf_stitch.evaluate(model, data_of(family)[16:], **FEW)) == found


def save_stitcher(family: str, form: str, folder: Path, inputs: Any) -> None:
    """A stitcher is attached to the form of which it was made, by its hash."""
    model = joined(family, form, True)
    model.stitcher.save_pretrained(folder)
    again = Stitcher.from_pretrained(folder).attach(loaded(family, form), partner(family))
    assert torch.equal(logits(again, family), logits(model, family))


def save(family: str, form: str, folder: Path, inputs: Any) -> None:
    """A model is saved and is the same when it is loaded, if what is in it can be built from its config."""
    model = joined(family, form, True)
    model.save_pretrained(folder)
    again, given = StitchedModel.from_pretrained(folder), model.preprocess(data_of(family)[:5])
    found, expected = (getattr(output, "logits", output) for output in (again(**given), model(**given)))
    assert torch.equal(found, expected)


def same(family: str, form: str, folder: Path, inputs: Any) -> None:
    """A form is the same as its twin up to rounding; integers are told as other weights, and are themselves."""
    data, other = data_of(family)[:4], loaded(family, form)
    found = versions.same(loaded_twin(family, form), other, data, progress=False)
    if form == "int8":
        assert not found.is_same and "weight differs by 0.00" in found.findings[0].weights[0]
        found = versions.same(other, load_form(family, form), data, progress=False)
    assert found.is_same, found.verdict


VERBS = {
    cut: "load, compare", hashed: "load, compare", compare: "load, compare", stitch: "stitch, evaluate",
    save_stitcher: "save a stitcher", save: "save whole", same: "same",
}  # fmt: skip
"""Verb -> its column on the page."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("verb", "family", "form"),
    [
        (verb, family, form)
        for verb in VERBS
        for family, form in CASES
        if verb is not compare or form not in EXACT or form == "offloaded"
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_verb_works_on_every_form_or_names_the_way_out_of_the_page(
    verb: Callable[..., None], family: str, form: str, inputs: Any, tmp_path: Path
) -> None:
    if way := way_out(form, VERBS[verb]):
        with pytest.raises(ValueError, match=re.escape(way)):
            verb(family, form, tmp_path, inputs)
    else:
        verb(family, form, tmp_path, inputs)


class Passing(transformers.BertForSequenceClassification):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Remote(transformers.BertForSequenceClassification):
    """A class of transformers that names the ids and passes on the rest, as much code on the Hub does."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, **kwargs)


@pytest.mark.parametrize("kind", [Passing, Remote])
def test_a_subclass_that_passes_on_its_arguments_accepts_its_class(kind: Any, inputs: Callable[..., Any]) -> None:
    plain = loaded("bert", "plain")
    model = kind(plain.model.config).eval()
    model.load_state_dict(plain.model.state_dict())
    adapter = hf_stitch.load(model, processor=plain_tokenizer())
    assert "attention_mask" in adapter.interface.arguments and "attention_mask" in adapter.example
    assert torch.equal(
        adapter.encode(inputs(adapter), BERT)[BERT].values, plain.encode(inputs(plain), BERT)[BERT].values
    )


class OwnMask(Wrapper):
    def forward(self, input_ids: Tensor) -> Any:
        return self.inner(input_ids, (input_ids != 0).long())


class WithoutMask(Wrapper):
    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return self.inner(input_ids)


class Anything(nn.Module):
    """User code of which nobody knows what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(80, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        mask = kwargs.get("attention_mask", torch.ones_like(kwargs["input_ids"]))[..., None]
        values = self.body(self.embed(kwargs["input_ids"]))
        return self.head((values * mask).sum(1) / mask.sum(1))


def test_user_code_gets_the_mask_of_the_tokenizer_if_its_example_has_one(texts: Any) -> None:
    example = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    adapter = hf_stitch.load(Anything().eval(), example_inputs=example, processor=plain_tokenizer())
    given = adapter.preprocess([sample["text"] for sample in texts[:5]])
    assert set(given) == {"input_ids", "attention_mask"}
    (found,) = adapter.encode(given, "body").values()
    assert found.mask is not None and torch.equal(found.mask, given["attention_mask"].bool())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: WithoutMask(build("bert", 0)),
            r"WithoutMask.*does not pass attention_mask.*BertForSequenceClassification",
        ),
        (Anything, r"Anything.*attention_mask.*example_inputs"),
    ],
    ids=["lost on its way", "unknown"],
)
def test_it_is_an_error_if_a_mask_does_not_arrive(make: Any, message: str) -> None:
    with pytest.raises(ExampleError, match=message):
        hf_stitch.load(make().eval(), example_inputs={"input_ids": IDS}, processor=plain_tokenizer())
    if make is not Anything:  # without a tokenizer, the user makes the inputs
        hf_stitch.load(make().eval(), example_inputs=IDS)


def test_a_network_that_makes_its_own_mask_is_accepted() -> None:
    adapter = hf_stitch.load(OwnMask(build("bert", 0)), example_inputs=IDS, processor=plain_tokenizer())
    assert adapter.interface.arguments == ()


def test_inputs_without_names_get_those_of_the_network_inside() -> None:
    given = (IDS, torch.ones_like(IDS))
    adapter = hf_stitch.load(Wrapper(build("bert", 0)), example_inputs=given, processor=plain_tokenizer())
    assert adapter.interface.content == ("input_ids",)
    assert adapter.layers == tuple(f"inner.bert.encoder.layer.{i}" for i in range(3))


def test_a_base_into_which_peft_has_put_an_adapter_is_not_compared_with_itself_silently(texts: Any) -> None:
    """``get_peft_model(base)`` changes ``base``, so that base and adapter would be equal at all layers."""
    model = build("bert", 0)
    base = hf_stitch.load(model, processor=plain_tokenizer())
    model.peft_config = {"default": object()}  # as PEFT does
    changed = hf_stitch.load(model, processor=plain_tokenizer())
    with pytest.warns(UserWarning, match=r"both networks are the same .*PEFT .* Load the base a second time"):
        hf_stitch.compare(base, changed, texts, progress=False)
