"""Activations of a text do not depend on the texts beside it, whatever the side of padding."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    ConvBertConfig,
    ConvBertForSequenceClassification,
    ConvBertForTokenClassification,
    GPT2Config,
    GPT2Model,
)

import hf_stitch
from benchmarks import padding, zoo
from hf_stitch.adapters.cutting.interface import positions_of
from hf_stitch.artefacts.joining import joined_to_itself

from tiny_networks import CLASSES, LAYERS, build, plain_tokenizer  # isort: skip

NONE, EITHER, COUNTED = "none: texts run in groups of equal length", "right or left", "right or left, with position_ids"
FAMILIES = {
    **dict.fromkeys(
        [("causal", name) for name in ("gpt2", "openai-gpt", "ctrl", "gpt_neo", "biogpt", "llama", "opt", "mixtral")],
        COUNTED,
    ),
    **dict.fromkeys([("causal", name) for name in ("roberta", "bloom", "mamba", "xlnet")], EITHER),
    **dict.fromkeys([("causal", name) for name in ("rwkv", "recurrent_gemma")], "right"),
    ("causal", "cpmant"): "left",
    ("causal", "xlstm"): NONE,
    **dict.fromkeys([("masked", "bert"), ("masked", "distilbert")], COUNTED),
    ("masked", "mpnet"): "right",
    ("masked", "ibert"): EITHER,
    **dict.fromkeys([("masked", "fnet"), ("masked", "convbert")], NONE),
    ("text", "bert"): "right",  # the head reads the first token
    ("text", "gpt2"): COUNTED,
    **dict.fromkeys([("text", "t5"), ("text", "bart")], "right"),  # the decoder of T5 begins before the padding
    ("text", "xlnet"): "left",  # the head reads the last token
}  # fmt: skip
"""Suite and family -> where texts are padded."""


class Attention(TorchDispatchMode):
    """Records the dtypes of products and softmax; some networks use float32, whatever the dtype of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        product = func is torch.ops.aten.bmm.default and args[0].shape[-1] > 1  # RoPE computes angles as outer products
        if product or func is torch.ops.aten._softmax.default:
            self.dtypes.add(output.dtype)
        return output


@cache
def family(suite: str, name: str, side: str) -> hf_stitch.Adapter:
    return padding.tokenizing(zoo.adapter_of(suite, name), side)


BOTH = (("causal", "gpt2"), ("causal", "mamba"), ("masked", "bert"), ("text", "bert"), ("text", "xlnet"))
CASES = [
    pytest.param(which, side, id=f"{':'.join(which)}-{side}")
    for number, which in enumerate(FAMILIES)
    for side in ("right", "left")
    if which in BOTH or number % 2 == (side == "left")
]
"""Some families with texts padded on either side; the others on one."""


@pytest.mark.parametrize(("which", "side"), CASES)
def test_activations_of_a_family_do_not_depend_on_the_batch(which: tuple[str, str], side: str) -> None:
    network = family(*which, side)
    assert network._padded().padding == FAMILIES[which]
    assert padding.moved(network, side, 8) <= 1e-5
    if which != ("causal", "mixtral"):  # experts have no kernel in float64
        network.model.double()
        try:
            with Attention() as attention:
                difference = padding.moved(padding.tokenizing(network), side, 8)
            assert difference <= (1e-7 if torch.float32 in attention.dtypes else 1e-12)
        finally:
            network.model.float()


@pytest.mark.parametrize(
    ("suite", "family"),
    [
        (row.suite, row.family)
        for row in zoo.read().values()
        if row.suite in ("text", "causal", "masked") and row.moved is not None and row.moved <= 1e-5
    ][::8],
)
def test_activations_of_no_family_depend_on_the_batch(suite: str, family: str) -> None:
    """One family of eight: the records of ``python -m benchmarks.zoo`` have all."""
    network = padding.tokenizing(zoo.adapter_of(suite, family))
    assert max(padding.moved(network, side, 8) for side in ("right", "left")) <= 1e-5


@pytest.mark.parametrize(
    ("which", "forwards"),
    [(("causal", "gpt2"), 2), (("text", "t5"), 2), (("masked", "convbert"), 2), (("masked", "fnet"), 0)],
)
def test_padding_is_verified_once(which: tuple[str, str], forwards: int) -> None:
    network, runs = padding.tokenizing(zoo.adapter_of(*which), "left"), []
    handle = network.model.register_forward_hook(lambda *_: runs.append(1))
    for _ in range(2):
        network._padded()
    handle.remove()
    assert len(runs) == forwards


# -- positions -----------------------------------------------------------------------------------------------------
def test_positions_of_texts_that_are_not_padded_on_the_left_are_those_of_the_network() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 1]])
    assert positions_of(mask).tolist() == [[0, 1, 2, 3], [0, 0, 0, 1], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def texts(count: int = 24) -> list[str]:
    draw = np.random.default_rng(0)
    return [" ".join(f"w{i}" for i in draw.integers(60, size=size)) for size in draw.integers(2, 12, size=count)]


def decoder(name: str = "gpt2", seed: int = 0, side: str = "left") -> hf_stitch.Adapter:
    tokenizer = plain_tokenizer()
    tokenizer.padding_side = side
    return hf_stitch.load(build(name, seed), processor=tokenizer)


def test_inputs_have_positions_beside_padding_on_the_left_only() -> None:
    given = texts(4)
    assert "position_ids" in decoder().preprocess(given)
    assert "position_ids" not in decoder(side="right").preprocess(given)
    assert "position_ids" not in decoder().preprocess(given[:1])
    network = decoder("bert")
    assert bool(network.preprocess(given)["attention_mask"][:, 0].all())  # on the right, and leaves the tokenizer
    assert network.processor.padding_side == "left" == network.processor.backend_tokenizer.padding["direction"]


def without_positions(network: hf_stitch.Adapter) -> dict[str, Tensor]:
    return {name: value for name, value in network.preprocess(texts(5)).items() if name != "position_ids"}


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_stitched_model_counts_positions_from_the_mask(name: str, side: str) -> None:
    network = decoder(name, side=side)
    model, inputs = joined_to_itself(network, LAYERS[name], network.task), without_positions(network)
    assert "position_ids" not in model.preprocess(texts(5))
    found, real = model(**inputs).logits, inputs["attention_mask"].bool()
    for row, text in enumerate(texts(5)):
        alone = network.model(**network.preprocess([text])).logits[0]
        torch.testing.assert_close(found[row][real[row]] if found.dim() == 3 else found[row], alone)
    if side == "right" or name == "bert":  # its bits stay
        assert torch.equal(found, network.model(**inputs).logits)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_texts_that_are_packed_into_one_row_do_not_attend_to_another(name: str) -> None:
    network = decoder(name)
    model = joined_to_itself(network, LAYERS[name], network.task)
    ids = torch.tensor([[7, 8, 9, 10, 7, 11, 12]])
    packed = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]]), "use_cache": False}
    found = model(**packed).logits
    assert torch.equal(found, network.model(**packed).logits)
    torch.testing.assert_close(found[:, 4:], model(input_ids=ids[:, 4:]).logits)


# -- texts by length ---------------------------------------------------------------------------------------------
def by_length(kind: Any = ConvBertForSequenceClassification, side: str = "right") -> hf_stitch.Adapter:
    config = ConvBertConfig(
        vocab_size=80, hidden_size=16, embedding_size=16, num_hidden_layers=3, num_attention_heads=2, head_ratio=1,
        intermediate_size=16, conv_kernel_size=3, max_position_embeddings=32, num_labels=CLASSES,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, tokenizer = kind(config).eval(), plain_tokenizer()
    tokenizer.padding_side = side
    return hf_stitch.load(model, processor=tokenizer)


@pytest.mark.parametrize("kind", [ConvBertForSequenceClassification, ConvBertForTokenClassification])
@pytest.mark.parametrize("tokens", [CLASSES, 3])
def test_outputs_of_texts_of_one_length_have_the_shape_of_the_network(kind: Any, tokens: int) -> None:
    network = by_length(kind)
    text = network.preprocess([" ".join(["w7"] * tokens)])
    padded = {name: torch.nn.functional.pad(value, (0, 2)) for name, value in text.items()}
    found, expected = network.forward(padded).logits, network.model(**padded).logits
    assert network._padded().sides == () and found.shape == expected.shape
    assert torch.equal(found[:, :tokens] if found.dim() == 3 else found, network.model(**text).logits)


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_hidden_states_and_attentions_of_texts_of_several_lengths(asked: str) -> None:
    network, given = by_length(), texts(5)
    model, key = joined_to_itself(network, "convbert.encoder.layer.1", network.task), asked[7:]
    inputs = model.preprocess(given)
    every = model(**inputs, **{asked: True})[key]
    for row, text in enumerate(given):
        count = int(inputs["attention_mask"][row].sum())
        for found, expected in zip(every, model(**model.preprocess([text]), **{asked: True})[key], strict=True):
            tokens = found[row, :count] if expected.dim() == 3 else found[row, :, :count, :count]
            torch.testing.assert_close(tokens, expected[0])


def test_one_row_of_positions_is_that_of_all_texts_of_any_length() -> None:
    network = by_length()
    inputs = network.preprocess(texts(4))
    positions = torch.arange(inputs["input_ids"].shape[1])[None]
    assert torch.equal(network.forward({**inputs, "position_ids": positions}).logits, network.forward(inputs).logits)


def test_positions_of_a_processor_reach_the_network() -> None:
    def read(text: str) -> dict[str, Tensor]:
        ids = torch.tensor([0, 0, *(int(word[1:]) + 4 for word in text.split())])
        return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "position_ids": torch.arange(len(ids)) + 3}

    network = hf_stitch.load(build("gpt2", 0), processor=read)
    assert network.preprocess(["w1 w2 w3"])["position_ids"].tolist() == [[3, 4, 5, 6, 7]]


# -- jobs ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("first", "second", "rows"),
    [
        ("causal:gpt2", "causal:gpt2", "mean"), ("causal:gpt2", "masked:bert", "tokens"),
        ("causal:rwkv", "causal:gpt2", "mean"), ("masked:fnet", "masked:convbert", "tokens"),
    ],
)  # fmt: skip
def test_similarities_depend_neither_on_the_batch_nor_on_the_order(first: str, second: str, rows: str) -> None:
    a, b = (family(*each.split(":"), "left") for each in (first, second))
    data = padding.texts(a, 20)
    order = np.random.default_rng(0).permutation(20).tolist()

    def scores(given: list[str], batch_size: int) -> Any:
        found = hf_stitch.compare(a, b, given, rows=rows, metrics=["linear_cka"], batch_size=batch_size, progress=False)
        return found["linear_cka"]

    expected = scores(data, 1)
    for found in (scores(data, 8), scores(data, 20), scores([data[i] for i in order], 8)):
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    "names",
    [("gpt2", "bert"), ("bert", "gpt2"), ("convbert", "bert"), ("gpt2", "convbert"), ("llama", "gpt2")], ids="-".join,
)  # fmt: skip
def test_networks_that_pad_on_any_sides_are_stitched_token_by_token(names: tuple[str, str]) -> None:
    layers = {**LAYERS, "convbert": "convbert.encoder.layer.1"}
    a, b = (by_length(side="left") if name == "convbert" else decoder(name) for name in names)
    sides = a._padded().sides, b._padded().sides
    made = [
        hf_stitch.stitch(a, b, texts(), source_layer=layers[names[0]], target_layer=layers[names[1]], matcher="ridge",
                         ridge=0.1, batch_size=size, progress=False)
        for size in (1, 24)
    ]  # fmt: skip
    torch.testing.assert_close(made[0].stitch.body.weight, made[1].stitch.body.weight, atol=1e-5, rtol=1e-5)
    if names[1] == "gpt2":
        scores = [hf_stitch.evaluate(made[0], texts(), batch_size=n, progress=False)["cross_entropy"] for n in (1, 24)]
        assert abs(scores[0].value - scores[1].value) < 1e-6
    inputs = made[0].preprocess(texts(5))
    on_the_left = bool((inputs["attention_mask"][:, 0] == 0).any())
    assert on_the_left == ({*names} == {"llama", "gpt2"}) and (a.interface.sides, b.interface.sides) == sides
    every = made[0](**inputs).logits
    for row, text in enumerate(texts(5)):
        alone = made[0](**made[0].preprocess([text])).logits[0]
        real = inputs["attention_mask"][row].bool()
        torch.testing.assert_close(every[row][real] if alone.dim() == 2 else every[row], alone)


@pytest.mark.parametrize("names", [("gpt2", "bert"), ("bert", "gpt2")], ids="-".join)
def test_swapped_encoders_depend_neither_on_the_batch_nor_on_the_side(names: tuple[str, str]) -> None:
    """A relative head takes another encoder, and a network has its first half replaced through a map."""
    anchors, data = texts(40)[:20], [(text, row % 3) for row, text in enumerate(texts(40)[20:])]
    (own, layer), model, encoder = (LAYERS[name] for name in names), decoder(names[0]), decoder(names[1], 1)
    found = []
    for side, size in (("left", 1), ("left", 8), ("right", 8)):
        model.processor.padding_side = encoder.processor.padding_side = side
        options = {"encoder_layer": layer, "batch_size": size, "progress": False}
        torch.manual_seed(0)
        head = hf_stitch.relative_model(model, anchors, layer=own, num_labels=3, batch_size=size, progress=False)
        swapped = [hf_stitch.swap(head, encoder, anchors, data=data, **options)]
        if model.task == "text-classification":
            mapped = hf_stitch.swap(model, encoder, anchors, target_layer=own, matcher="ridge", data=data, **options)
            swapped.append(mapped)
        scores = [each.evaluation.scores[name]["cross_entropy"] for each in swapped for name in ("stitched", "target")]
        found.append([score.value for score in scores])
    np.testing.assert_allclose(found[1:], found[:1] * 2, rtol=0, atol=1e-6)


# -- bad input -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["padded", "by length"])
def test_a_mask_of_zeros_changes_no_other_text(how: str) -> None:
    network, layer = (decoder(), LAYERS["gpt2"]) if how == "padded" else (by_length(), "convbert.encoder.layer.1")
    inputs = network.preprocess(texts(4))
    inputs["attention_mask"][0] = 0
    found = network.encode(inputs, layer)[layer]
    assert not bool(found.mask[0].any())
    with pytest.raises(ValueError, match="sample 0 of the batch is completely masked"):
        found.rows("mean")
    alone = network.encode(network.preprocess(texts(4)[1:2]), layer)[layer]
    torch.testing.assert_close(found.values[1][found.mask[1]], alone.values[0])


def test_texts_beyond_the_table_of_positions_are_truncated_beside_padding_on_the_left() -> None:
    limit, tokenizer = 8, plain_tokenizer()
    tokenizer.padding_side = "left"
    model = GPT2Model(GPT2Config(vocab_size=80, n_embd=8, n_layer=1, n_head=1, n_positions=limit)).eval()
    network = hf_stitch.load(model, processor=tokenizer)
    with pytest.warns(UserWarning, match=f"1 of 2 texts are longer than the {limit} tokens"):
        inputs = network.preprocess([" ".join(["w7"] * (limit + 3)), "w5 w6"])
    assert inputs["position_ids"][1, -2:].tolist() == [0, 1] and int(inputs["position_ids"].max()) == limit - 1


def test_a_network_that_cannot_be_helped_is_named_once() -> None:
    network = padding.tokenizing(zoo.adapter_of("masked", "funnel"), "right")
    with pytest.warns(UserWarning, match="of FunnelForMaskedLM depend on the batch because any padding changes them"):
        network._padded()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network._padded()
