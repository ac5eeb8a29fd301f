"""Forms of one network: whatever wraps it or holds its weights, inputs arrive and the numbers are the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from forms import EXACT, FORMS, ROUNDED, Wrapper, layer_in, load_form, loaded
from tiny_networks import LAYERS, build, plain_tokenizer
from torch import Tensor, nn

import hf_stitch
from hf_stitch.adapters.examples import ExampleError

BERT = LAYERS["bert"]
IDS = torch.arange(4, 16).reshape(2, 6)

CASES = [("bert", form) for form in FORMS] + [
    ("llama", form) for form in FORMS if form not in ("wrapped", "lora")
]  # a cache among the outputs bypasses cuts


@pytest.mark.parametrize(("family", "form"), CASES)
@pytest.mark.parametrize("padding", ["left", "right"])
def test_layers_and_activations_of_padded_texts_are_those_of_the_plain_network(
    family: str, form: str, padding: str, inputs: Callable[..., Any]
) -> None:
    plain, other = loaded(family, "plain"), loaded(family, form)
    assert other.layers == tuple(layer_in(other, layer) for layer in plain.layers)
    expected = plain.encode(inputs(plain, padding), LAYERS[family])[LAYERS[family]]
    given = inputs(other, padding)
    found = other.encode(given, layer := layer_in(other, LAYERS[family]))[layer]
    assert bool((given["attention_mask"] == 0).any())
    assert found.mask is not None and torch.equal(found.mask, expected.mask)
    wanted, values = expected.values[expected.mask], found.values[found.mask]
    if form in EXACT:
        assert torch.equal(values, wanted)
    else:
        tolerance = 2e-2 if form in ROUNDED else 1e-5
        torch.testing.assert_close(values.float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_has_cka_1_with_itself_in_each_form(form: str, texts: Any) -> None:
    plain, other = loaded("bert", "plain"), loaded("bert", form)
    found = hf_stitch.compare(plain, other, [sample["text"] for sample in texts], metrics=["linear_cka"])
    diagonal = torch.as_tensor(next(iter(found.values.values()))).diagonal()
    torch.testing.assert_close(diagonal.double(), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-3)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "pruned"])  # by hooks, which halves do not have
def test_a_form_joined_to_the_plain_network_computes_as_the_network_does(
    form: str, texts: Any, inputs: Callable[..., Any]
) -> None:
    plain, other = loaded("bert", "plain"), load_form("bert", form)
    stitched = hf_stitch.stitch(
        other, plain, texts, source_layer=layer_in(other, BERT), target_layer=BERT, matcher="identity"
    )
    with torch.no_grad():
        expected, found = plain.forward(inputs(plain)).logits, stitched(**inputs(other)).logits
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=1e-2 if form in ROUNDED else 1e-5)


class Passing(transformers.BertForSequenceClassification):
    """A class of transformers whose forward passes on what it gets."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Remote(transformers.BertForSequenceClassification):
    """A class of transformers that names the ids and passes on the rest, as much code on the Hub does."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, **kwargs)


@pytest.mark.parametrize("kind", [Passing, Remote])
def test_a_subclass_that_passes_on_its_arguments_takes_those_of_its_class(
    kind: Any, inputs: Callable[..., Any]
) -> None:
    plain = loaded("bert", "plain")
    model = kind(plain.model.config).eval()
    model.load_state_dict(plain.model.state_dict())
    adapter = hf_stitch.load(model, processor=plain_tokenizer())
    assert "attention_mask" in adapter.interface.arguments and "attention_mask" in adapter.example
    assert torch.equal(
        adapter.encode(inputs(adapter), BERT)[BERT].values, plain.encode(inputs(plain), BERT)[BERT].values
    )


class OwnMask(nn.Module):
    """User code that finds padding itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("bert", 0)

    def forward(self, input_ids: Tensor) -> Any:
        return self.inner(input_ids, (input_ids != 0).long())


class WithoutMask(nn.Module):
    """User code that loses the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("bert", 0)

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


class Named(Anything):
    """User code that names the mask."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(
            input_ids=input_ids, **({} if attention_mask is None else {"attention_mask": attention_mask})
        )


def test_user_code_that_names_a_mask_gets_that_of_the_tokenizer(texts: Any) -> None:
    adapter = hf_stitch.load(Named().eval(), example_inputs=IDS, processor=plain_tokenizer())
    given = adapter.preprocess([sample["text"] for sample in texts[:5]])
    assert set(given) == {"input_ids", "attention_mask"}
    (found,) = adapter.encode(given, "body").values()
    assert found.mask is not None and torch.equal(found.mask, given["attention_mask"].bool())


def test_a_mask_in_the_example_is_taken_from_the_tokenizer_too(texts: Any) -> None:
    example = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    adapter = hf_stitch.load(Anything().eval(), example_inputs=example, processor=plain_tokenizer())
    assert set(adapter.preprocess([sample["text"] for sample in texts[:5]])) == {"input_ids", "attention_mask"}


def test_a_mask_that_does_not_arrive_at_the_network_inside_is_an_error() -> None:
    with pytest.raises(ExampleError, match=r"WithoutMask.*does not pass attention_mask.*BertForSequenceClassification"):
        hf_stitch.load(WithoutMask().eval(), example_inputs=IDS, processor=plain_tokenizer())
    hf_stitch.load(WithoutMask().eval(), example_inputs=IDS)  # without a tokenizer, the user makes the inputs


def test_it_is_an_error_if_nobody_knows_whether_the_network_takes_a_mask() -> None:
    with pytest.raises(ExampleError, match=r"Anything.*attention_mask.*example_inputs"):
        hf_stitch.load(Anything().eval(), example_inputs={"input_ids": IDS}, processor=plain_tokenizer())


def test_a_network_that_makes_its_own_mask_is_accepted() -> None:
    adapter = hf_stitch.load(OwnMask().eval(), example_inputs=IDS, processor=plain_tokenizer())
    assert adapter.interface.arguments == ()


@pytest.mark.parametrize("given", [IDS, (IDS, torch.ones_like(IDS))])
def test_inputs_without_names_get_those_of_the_network_inside(given: Any) -> None:
    adapter = hf_stitch.load(Wrapper(build("bert", 0)), example_inputs=given, processor=plain_tokenizer())
    assert adapter.interface.content == ("input_ids",)
    assert adapter.layers == tuple(f"inner.bert.encoder.layer.{i}" for i in range(3))


def test_prompts_of_peft_stay_in_the_network(texts: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads what transformers 5.24 renamed
        model = peft.get_peft_model(build("bert", 0), config).eval()
    adapter = hf_stitch.load(model, example_inputs={"input_ids": IDS}, processor=plain_tokenizer())
    assert adapter.model is model
    given = adapter.preprocess([sample["text"] for sample in texts[:5]])
    with torch.no_grad():
        assert torch.equal(adapter.forward(given).logits, model(**given).logits)


def test_a_base_into_which_peft_has_put_an_adapter_is_not_compared_with_itself_silently(texts: Any) -> None:
    """``get_peft_model(base)`` changes ``base``, so that base and adapter would be equal at all layers."""
    model = build("bert", 0)
    base = hf_stitch.load(model, processor=plain_tokenizer())
    model.peft_config = {"default": object()}  # as PEFT does
    changed = hf_stitch.load(model, processor=plain_tokenizer())
    with pytest.warns(UserWarning, match=r"both networks are the same .*PEFT .* Load the base a second time"):
        hf_stitch.compare(base, changed, texts, progress=False)
