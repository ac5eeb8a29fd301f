"""``diff`` equals hybrids that are built by hand, puts planted changes first, and finds nothing in copies."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hf_stitch_testing import check_command
from hf_stitch_versions import Difference, diff, diff_all
from hf_stitch_versions.changes.moved import Moved
from hf_stitch_versions.changes.weights import effective, weight_change
from hf_stitch_versions.cli import diff as command
from torch import Tensor, nn
from typer.testing import CliRunner

import hf_stitch
from hf_stitch import Adapter
from hf_stitch.cli import app

from tests.forms import adapter_of, load_form, twin  # isort: skip
from tests.tiny_networks import LAYERS, SIZE, TEXT, WORDS, adapted, build, network, other_tokenizer, plain_tokenizer  # isort: skip

FAMILIES = ("bert", "gpt2", "llama", "vit", "cnn", "swin", "t5")
TEXTS = [" ".join(WORDS[i : i + 2 + i % 6]) for i in range(40)]
IMAGES = torch.randn(40, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))


def data_of(family: str) -> Any:
    return TEXTS if network(family).interface.modality == "text" else IMAGES


def compared(a: Adapter, b: Adapter, data: Any = None, **options: Any) -> Difference:
    return diff(a, b, data, progress=False, **options)


def edited(family: str, layer: str) -> nn.Module:
    """A network of which one block is trained for some steps: its outputs move away from those that it had."""
    model = build(family, 0)
    a, data = network(family), data_of(family)
    inputs = a.preprocess(data if isinstance(data, list) else list(data))
    optimizer = torch.optim.Adam(model.get_submodule(layer).parameters(), lr=1e-3)
    for _ in range(8):
        output = model(**inputs, **a.interface.options)
        values = output if isinstance(output, Tensor) else output[0]
        optimizer.zero_grad()
        (-values.log_softmax(-1)[..., 0]).mean().backward()
        optimizer.step()
    return model.eval()


def rounded(model: nn.Module, levels: int) -> nn.Module:
    model = copy.deepcopy(model)
    for value in model.parameters():
        if value.dim() > 1:
            scale = value.data.flatten(1).abs().amax(1).clamp(min=1e-9).view(-1, *[1] * (value.dim() - 1)) / levels
            value.data = (value.data / scale).round() * scale
    return model


def kl(a: Adapter, hybrid: nn.Module, data: Any) -> float:
    """The divergence of a network that is built by hand, without the engine."""
    inputs = a.preprocess(data if isinstance(data, list) else list(data))
    with torch.no_grad():
        one, two = (model.eval()(**inputs, **a.interface.options) for model in (a.model, hybrid))
    one, two = (getattr(each, "logits", each).double().log_softmax(-1) for each in (one, two))
    values = (one.exp() * (one - two)).sum(-1)
    if values.dim() > 1:
        mask = inputs["attention_mask"]
        values = (values * mask).sum(1) / mask.sum(1)
    return float(values.mean())


# -- hybrids -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["bert", "gpt2", "cnn"])
def test_effects_equal_those_of_hybrids_built_by_hand(family: str) -> None:
    a, model, data = network(family), rounded(edited(family, LAYERS[family]), 7), data_of(family)
    found = compared(a, adapted(family, model), data, batch_size=7)
    assert found.outputs is not None and found.outputs.measure == "KL"
    assert found.outputs.forth.value == pytest.approx(kl(a, model, data), rel=1e-3)
    for part in found.parts:
        if part.effect is None:
            continue
        patched, reverted = copy.deepcopy(a.model), copy.deepcopy(model)
        for name, value in a.model.state_dict().items():  # tied weights belong to one part
            inside = name.startswith(f"{part.name}.") or (part.name == "transformer.wte" and name == "lm_head.weight")
            if inside or name == part.name:
                patched.state_dict()[name].copy_(model.state_dict()[name])
                reverted.state_dict()[name].copy_(value)
        assert part.effect.patch.value == pytest.approx(kl(a, patched, data), rel=1e-3, abs=1e-9), part.name
        assert part.effect.revert.value == pytest.approx(kl(a, reverted, data), rel=1e-3, abs=1e-9), part.name


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_curves_equal_halves_joined_by_hand(family: str) -> None:
    a, data = network(family), data_of(family)
    model = build(family, 0)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.02 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(value)))
    found = compared(a, adapted(family, model), data)
    place = LAYERS[family]
    first = list(found.curves)[1 : list(found.curves).index(place) + 1]
    halves = copy.deepcopy(model), copy.deepcopy(a.model)  # the first network first, the second first
    for half, source in zip(halves, (a.model, model), strict=True):
        for name in first:
            half.set_submodule(name, copy.deepcopy(source.get_submodule(name)))
    values = [each.value for each in found.curves[place]]
    assert values == pytest.approx([kl(a, half, data) for half in halves], rel=1e-3)
    ends = [[each.value for each in pair] for pair in found.curves.values()]
    assert found.outputs is not None
    assert ends[0] == [found.outputs.forth.value, 0] and ends[-1] == [0, found.outputs.forth.value]


def test_the_result_does_not_depend_on_batches_and_order() -> None:
    a, b = network("bert"), adapted("bert", rounded(edited("bert", LAYERS["bert"]), 7))
    one, two = compared(a, b, TEXTS, batch_size=40), compared(a, b, TEXTS[::-1], batch_size=7)
    for x, y in zip(one.parts, two.parts, strict=True):
        if x.effect is not None and y.effect is not None:
            assert x.effect.patch.value == pytest.approx(y.effect.patch.value, rel=1e-3, abs=1e-10)
            assert x.effect.noise == pytest.approx(y.effect.noise, rel=1e-3, abs=1e-10)
    tokenizer = plain_tokenizer()
    tokenizer.padding_side = "left"
    models = build("gpt2", 0), edited("gpt2", LAYERS["gpt2"])
    a, b = (hf_stitch.load(model, processor=tokenizer) for model in models)
    outputs = [compared(a, b, TEXTS[:12], batch_size=size).outputs for size in (1, 12)]
    assert outputs[0].forth.value == pytest.approx(outputs[1].forth.value, rel=1e-4)  # type: ignore[union-attr]


# -- findings ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("family", "levels"), [*((each, None) for each in FAMILIES), ("bert", 127), ("llama", 127)])
def test_a_planted_block_is_the_finding(family: str, levels: int | None) -> None:
    model = edited(family, LAYERS[family])
    found = compared(
        network(family), adapted(family, model if levels is None else rounded(model, levels)), data_of(family)
    )
    assert [part.name for part in found.causes] == [LAYERS[family]], found
    assert found.verdict.startswith(f"{LAYERS[family]} alone carries ")
    if levels is None:
        assert [part.name for part in found.parts if part.weights.change] == [LAYERS[family]]
        assert found.causes[0].effect is not None and found.causes[0].effect.share.value == pytest.approx(1)


@pytest.mark.parametrize(
    ("family", "copied"),
    [*((each, "bfloat16") for each in FAMILIES), ("bert", "int8"), ("llama", "int8")],
)
def test_copies_have_no_findings(family: str, copied: str) -> None:
    model = build(family, 0)
    model = model.to(torch.bfloat16) if copied == "bfloat16" else rounded(model, 127)
    found = compared(network(family), adapted(family, model), data_of(family))
    assert not found.causes
    assert found.verdict.startswith("No part changes the outputs more than noise of the same size")
    assert found.weights.rounding and found.weights.format.startswith(copied)


def test_a_block_is_divided_into_attention_and_mlp() -> None:
    model = build("bert", 0)
    block = "bert.encoder.layer.1"
    inner = edited("bert", f"{block}.attention")
    model.load_state_dict(inner.state_dict())
    found = compared(network("bert"), adapted("bert", model), TEXTS, within=[block])
    names = [part.name for part in found.parts if part.name.startswith(block)]
    assert names == [f"{block}.attention", f"{block}.intermediate", f"{block}.output"]
    assert [part.name for part in found.causes] == names[:1]
    assert found.causes[0].effect is not None and found.causes[0].effect.share.value == pytest.approx(1)
    assert names[1] in found.curves


def test_equal_networks_have_no_difference() -> None:
    found = compared(network("bert"), adapted("bert", build("bert", 0)), TEXTS)
    assert found.verdict.startswith("The outputs are equal on 40 samples.")
    assert found.forwards < 3 + 2 * len(found.parts)
    assert {part.weights.change for part in found.parts} == {0.0}
    assert [pair[0].value for pair in found.curves.values()] == [0.0] * len(found.curves)


@pytest.mark.parametrize("family, form", [
    *(("bert", form) for form in ("lora", "compiled", "wrapped", "int8", "fp16")),
    *(("llama", form) for form in ("old spectral norm", "tensor subclass", "offloaded", "half pruned")),
])  # fmt: skip
def test_any_form_of_a_network_is_read(family: str, form: str) -> None:
    a, b = adapter_of(family, twin(family, form)), load_form(family, form)
    found = compared(a, b, TEXTS)
    assert found.weights.change <= {"lora": 1e-6, "int8": 0.01, "fp16": 0.001}.get(form, 0.0)
    assert not found.causes and not found.missing and not found.extra
    backwards = compared(b, a, TEXTS)
    assert backwards.weights.change == pytest.approx(found.weights.change, rel=0.01, abs=1e-9)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft reads what transformers 5.24 renamed
def test_an_adapter_of_peft_is_its_product() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["query", "value"], r=2)
    model = peft.get_peft_model(build("bert", 0), config).eval()
    a, b = network("bert"), hf_stitch.load(model, processor=plain_tokenizer())
    untrained = compared(a, b, TEXTS)
    assert untrained.weights.change == 0.0
    assert untrained.outputs is not None and untrained.outputs.forth.value == 0.0
    assert untrained.outputs.agreement is not None and untrained.outputs.agreement.value == 1.0
    layer = b.model.get_submodule("bert.encoder.layer.1.attention.self.query")
    layer.lora_B["default"].weight.data.fill_(0.3)
    part = compared(a, b, TEXTS).parts[2]
    block = a.model.get_submodule("bert.encoder.layer.1")
    size = sum(value.norm() ** 2 for value in block.parameters()) ** 0.5
    assert part.weights.change == pytest.approx(float(layer.get_delta_weight("default").norm() / size), rel=1e-5)
    assert part.weights.rank < 0.07  # one direction of 32
    assert part.effect is not None and part.effect.share.value == pytest.approx(1)


# -- weights -----------------------------------------------------------------------------------------------------------
def test_weight_changes_equal_dense_algebra() -> None:
    draw = torch.Generator().manual_seed(0)
    x, u, v = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((20, 30), (20, 2), (2, 30)))
    found = weight_change({"w": x}, {"w": x + u @ v})
    values = np.linalg.svd((u @ v).numpy(), compute_uv=False)
    share = values[values > 1e-9] / values.sum()
    assert found.rank == pytest.approx(np.exp(-(share * np.log(share)).sum()) / 20, rel=1e-5)
    assert found.change == pytest.approx(float((u @ v).norm() / x.norm()))
    assert found.cosine == pytest.approx(float((x * (x + u @ v)).sum() / x.norm() / (x + u @ v).norm()))


@pytest.mark.parametrize(("levels", "group", "told"), [
    (127, None, "int8 by row"), (7, None, "int4 by row"), (7, 32, "int4 by group of 32"),
    (7, 64, "int4 by group of 64"),
])  # fmt: skip
def test_formats_are_recognised(levels: int, group: int | None, told: str) -> None:
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    rows = x.view(-1, group or 256)
    scale = rows.abs().amax(1, keepdim=True) / levels
    y = ((rows / scale).round() * scale).view_as(x)
    found = weight_change({"w": x}, {"w": y})
    assert (found.format, found.rounding) == (told, True)
    other = weight_change({"w": torch.randn(32, 256, generator=torch.Generator().manual_seed(5))}, {"w": y})
    assert (other.format, other.rounding) == (told, False)
    assert weight_change({"w": x}, {"w": x + 0.01 * torch.randn(32, 256)}).format == ""


@pytest.mark.parametrize("outlier", [0, 299])
def test_dynamic_integers_of_torch_are_int8_wherever_the_largest_number_is(outlier: int) -> None:
    """One scale holds for the whole matrix: most rows may have few levels, and would do with int4."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 10))
    model[0].weight.data[outlier, 5] = 20 * model[0].weight.data.abs().max()
    rounded_ = form_of_integers(model)
    found = weight_change(effective(model), effective(rounded_))
    assert (found.format, found.rounding) == ("int8 by matrix", True)


def form_of_integers(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated
        return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})


def test_parametrisations_and_masks_are_applied() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 5) for _ in range(3)]
    nn.utils.parametrizations.weight_norm(layers[0])
    nn.utils.prune.l1_unstructured(layers[1], "weight", 0.5)
    model = nn.Sequential(*layers[:2], nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(5, 5))))
    found = effective(model)
    for name, layer in (("0", model[0]), ("1", model[1]), ("2.0", model[2][0])):
        width = layer.in_features
        assert torch.allclose(layer(torch.eye(width)) - layer.bias, found[f"{name}.weight"].T, atol=1e-6)
    assert list(found) == ["0.bias", "0.weight", "1.bias", "1.weight", "2.0.bias", "2.0.weight"]


def test_weights_that_hooks_make_are_those_of_the_next_forward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    torch.nn.utils.weight_norm(model[0])
    nn.utils.prune.l1_unstructured(model[1], "weight", 0.5)
    model[0].weight_v.data[0] *= 3  # the attribute is older
    model[1].weight_orig.data *= 2
    found = effective(model)
    assert list(found) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    model(torch.ones(1, 6))
    for name in "01":
        assert torch.allclose(found[f"{name}.weight"], model[int(name)].weight)


# -- other names and shapes --------------------------------------------------------------------------------------------
def test_prefixes_do_not_matter() -> None:
    a = network("bert")
    b = hf_stitch.load(copy.deepcopy(a.model).bert, processor=plain_tokenizer())
    found = compared(a, b)
    assert not any(part.weights.change for part in found.parts)
    assert found.missing == ("classifier.weight", "classifier.bias")


def test_another_number_of_classes_is_told() -> None:
    found = compared(network("bert"), with_another_head(7))
    assert found.reshaped == ("classifier.weight (3, 32) against (7, 32)", "classifier.bias (3,) against (7,)")


def longer(old: nn.Module, places: int) -> nn.Module:
    """An embedding with more rows, of which the first are those of another one."""
    new = nn.Embedding(places, 32)
    new.weight.data[: len(old.weight)] = old.weight.data
    return new


def more_tokens(model: Any) -> nn.Module:
    model.set_input_embeddings(longer(model.get_input_embeddings(), 90))
    return model


def more_positions(model: Any) -> nn.Module:
    embeddings = model.bert.embeddings
    embeddings.position_embeddings = longer(embeddings.position_embeddings, 600)
    return model


def one_more_layer(model: Any) -> nn.Module:
    model.bert.encoder.layer.append(copy.deepcopy(model.bert.encoder.layer[0]))
    return model


def without_a_bias(model: Any) -> nn.Module:
    model.bert.encoder.layer[1].intermediate.dense.bias = None
    return model


def with_another_axis(model: Any) -> nn.Module:
    norm = model.bert.encoder.layer[1].output.LayerNorm
    norm.register_buffer("scale", torch.ones(1, 1))
    return model


def more_classes(model: Any) -> nn.Module:
    new = nn.Linear(32, 7)
    new.weight.data[:3], new.bias.data[:3] = model.classifier.weight.data, model.classifier.bias.data
    model.classifier, model.config.num_labels = new, 7
    return model


PARTNERLESS: dict[str, tuple[Callable[[Any], nn.Module], str]] = {
    "tokens": (more_tokens, "bert.embeddings"),
    "positions": (more_positions, "bert.embeddings"),
    "a layer": (one_more_layer, ""),
    "a head, and a prefix": (lambda model: model.bert, ""),
    "a bias": (without_a_bias, "bert.encoder.layer.1"),
    "a buffer": (with_another_axis, "bert.encoder.layer.1"),
    "classes": (more_classes, "classifier"),
}
"""What has no partner -> what changes the second network, and the part in which that is; empty if it is in none."""


def change_by_hand(one: nn.Module, two: nn.Module) -> float:
    """The relative change of networks as vectors, whose weights are padded with zeros."""
    sides = [
        {name.removeprefix("bert."): value.double() for name, value in model.state_dict().items()}
        for model in (one, two)
    ]  # fmt: skip
    gap = size = 0.0
    for name in {*sides[0], *sides[1]}:
        shapes = [tuple(side[name].shape) for side in sides if name in side]
        x, y = (np.zeros([max(sizes) for sizes in zip(*shapes, strict=True)]) for _ in "ab")
        for side, padded in zip(sides, (x, y), strict=True):
            if name in side:
                padded[tuple(map(slice, side[name].shape))] = side[name]
        gap, size = gap + float(((x - y) ** 2).sum()), size + float((x**2).sum())
    return float(np.sqrt(gap / size))


@pytest.mark.parametrize("what", PARTNERLESS)
@pytest.mark.parametrize("backwards", [False, True])
def test_what_has_no_partner_counts_as_change(what: str, backwards: bool) -> None:
    change, place = PARTNERLESS[what]
    pair = [build("bert", 0), build("bert", 0)]
    for value in (each for model in pair for each in model.parameters() if each.dim() == 1):
        value.data += 0.1
    pair[1] = change(pair[1])
    one, two = pair[::-1] if backwards else pair
    a, b = (hf_stitch.load(each, processor=plain_tokenizer()) for each in (one, two))
    found = compared(a, b, fail_above={"weight_change": 1e-4})
    assert found.weights.change == pytest.approx(change_by_hand(one, two), rel=1e-9) and len(found.failed) == 1
    assert found.weights.alone == found.weights.change  # what both have is equal
    assert (
        found.verdict.startswith("All common weights are equal, but ")
        and "a partner of the same shape" in found.verdict
    )
    assert [part.name for part in found.parts if part.weights.change] == [place] * bool(place)
    family = diff_all({"one": a, "two": b}, progress=False)
    assert family.pairs[0].weight_change == pytest.approx(found.weights.change, rel=1e-12)


def test_rows_that_both_have_are_compared() -> None:
    a, b = network("bert"), adapted("bert", more_tokens(build("bert", 0)))
    words = b.model.get_input_embeddings().weight
    words.data[:80] += words.data[:80].std() * torch.randn(80, 32, generator=torch.Generator().manual_seed(0))
    found = compared(a, b)
    assert found.weights.change == pytest.approx(change_by_hand(a.model, b.model), rel=1e-9)
    assert found.weights.change > found.weights.alone > 0
    assert found.verdict.startswith("The weights of 1 of 6 parts differ, most in bert.embeddings")
    assert "in weights of only one network" in found.verdict


def with_more_tokens(family: str, more: int = 3) -> tuple[Adapter, Adapter, nn.Module]:
    """A network, and a copy with tokens added that it predicts often."""
    models = [bert_for_tokens() if family == "bert" else build(family, 0) for _ in "ab"]
    models[1].resize_token_embeddings(80 + more, mean_resizing=False)
    draw = torch.Generator().manual_seed(0)
    head = models[1].get_output_embeddings().weight
    head.data[80:] = 3 * torch.randn(more, head.shape[1], generator=draw)
    a, b = (hf_stitch.load(model, processor=plain_tokenizer()) for model in models)
    return a, b, models[1]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_a_longer_vocabulary_is_compared_whole(family: str) -> None:
    a, b, _ = with_more_tokens(family)
    inputs, mask = a.preprocess(TEXTS), a.preprocess(TEXTS)["attention_mask"].double()
    with torch.no_grad():
        p, q = (each.model(**inputs).logits.double().log_softmax(-1) for each in (a, b))
    kl = (p.exp() * (p - q[..., :80])).sum(-1)  # tokens that the first network does not have add nothing
    equal = (p.argmax(-1) == q.argmax(-1)).double()
    kl, equal = (float(((each * mask).sum(1) / mask.sum(1)).mean()) for each in (kl, equal))
    found = compared(a, b, TEXTS, fail_above={"KL": 1e-3, "disagreement": 1e-3})
    assert found.outputs is not None and found.outputs.agreement is not None
    assert found.outputs.forth.value == pytest.approx(kl) and kl > 0.01
    assert found.outputs.agreement.value == pytest.approx(equal) and equal < 0.9
    assert len(found.failed) == 2 and any("80 and 83 tokens" in note for note in found.notes)
    backwards = compared(b, a, TEXTS, fail_above={"KL": 1e-3, "disagreement": 1e-3})
    assert backwards.outputs is not None and len(backwards.failed) == 2
    assert backwards.outputs.forth.value == pytest.approx(found.outputs.back.value)
    (pair,) = diff_all({"one": a, "two": b}, TEXTS, progress=False).pairs
    assert pair.forth is not None and pair.agreement is not None
    assert pair.forth.value == pytest.approx(kl) and pair.agreement.value == pytest.approx(equal)


def test_a_block_is_found_beside_a_longer_vocabulary() -> None:
    a, model = network("llama"), edited("llama", LAYERS["llama"])
    model.resize_token_embeddings(90, mean_resizing=False)
    model.lm_head.weight.data[80:] = -10 * model.lm_head.weight.data[:10]
    found = compared(a, adapted("llama", model), TEXTS)
    assert len(found.reshaped) == 2 and [part.name for part in found.causes] == [LAYERS["llama"]]
    assert "(model.embed_tokens, lm_head)" in found.verdict


@pytest.mark.parametrize(("tokenizer", "fails"), [(other_tokenizer, True), (plain_tokenizer, False), (None, False)])
def test_a_bound_fails_where_the_networks_read_other_inputs(tokenizer: Any, fails: bool) -> None:
    second = plain_tokenizer() if tokenizer is None else tokenizer()
    second.padding_side = "left" if tokenizer is None else "right"
    a, b = network("gpt2"), hf_stitch.load(build("gpt2", 0), processor=second)
    found = compared(a, b, TEXTS, fail_above={"weight_change": 1, "KL": 1})
    assert bool(found.failed) == fails
    assert all(each.startswith("KL holds for the inputs of the first network") for each in found.failed)
    assert not compared(a, b, TEXTS, fail_above={"weight_change": 1}).failed


@pytest.mark.parametrize(("setting", "kernel", "told"), [(1e-2, "sdpa", True), (1e-12, "eager", False)])
def test_other_code_is_a_finding_but_no_rounding_of_it(setting: float, kernel: str, told: bool) -> None:
    model = build("vit", 0)
    model.vit.layers[1].layernorm_before.eps = setting
    model.set_attn_implementation(kernel)
    found = compared(network("vit"), adapted("vit", model), IMAGES)
    assert found.weights.change == 0
    assert [part.name for part in found.causes] == [LAYERS["vit"]] * told, found


def bert_for_tokens() -> nn.Module:
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)).eval()


def test_a_tied_weight_takes_no_other_along() -> None:
    a, b = bert_for_tokens(), bert_for_tokens()
    draw = torch.Generator().manual_seed(0)
    head = b.cls.predictions.transform.dense.weight
    head.data += 0.1 * torch.randn(head.shape, generator=draw)
    b.bert.embeddings.LayerNorm.bias.data[0] += 1e-6
    found = compared(*(hf_stitch.load(each, processor=plain_tokenizer()) for each in (a, b)), TEXTS)
    shares = {part.name: part.effect.share.value for part in found.parts if part.effect is not None}
    assert shares["cls"] == pytest.approx(1, rel=1e-3) and abs(shares["bert.embeddings"]) < 1e-4


@pytest.mark.parametrize("row", [0, 1])
def test_all_answers_of_a_network_are_compared(row: int) -> None:
    """Where an answer starts and where it ends are two outputs."""
    torch.manual_seed(0)
    models = [transformers.BertForQuestionAnswering(transformers.BertConfig(**TEXT)).eval() for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    models[1].qa_outputs.weight.data[row] *= 1.5
    a, b = (hf_stitch.load(model, processor=plain_tokenizer()) for model in models)
    found = compared(a, b, TEXTS, fail_above={"squared_difference": 1e-6})
    assert len(found.failed) == 1 and [part.name for part in found.parts if part.effect is not None] == ["qa_outputs"]


def test_an_output_that_is_not_compared_is_told() -> None:
    body = copy.deepcopy(network("bert").model).bert
    found = compared(
        *(hf_stitch.load(each, processor=plain_tokenizer()) for each in (body, copy.deepcopy(body))), TEXTS
    )
    assert any("pooler_output is not compared" in note for note in found.notes) == (body.pooler is not None)


def untied(change: str) -> nn.Module:
    """A network whose head was tied to its embeddings, with a change of one of them."""
    model = build("gpt2", 0)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data.clone())
    if change:
        weight = model.get_submodule(change).weight
        weight.data += weight.data.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("change", ["", "lm_head", "transformer.wte"])
@pytest.mark.parametrize("backwards", [False, True])
def test_of_tied_weights_that_one_is_told_that_differs(change: str, backwards: bool) -> None:
    pair = [network("gpt2"), hf_stitch.load(untied(change), processor=plain_tokenizer())]
    found = compared(*(pair[::-1] if backwards else pair), TEXTS)
    changed = [part for part in found.parts if part.weights.change]
    assert [part.label for part in changed] == [change] * bool(change)
    effects = {part.name: part.effect for part in found.parts if part.effect is not None}
    assert list(effects) == [change] * bool(change)
    assert all(effect.share.value == pytest.approx(1) for effect in effects.values())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of peft, on tied layers
def test_an_adapter_on_a_tied_head_is_a_change_of_the_head() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("gpt2", 0), peft.LoraConfig(target_modules=["lm_head"], r=2))
    model.base_model.model.lm_head.lora_B["default"].weight.data.fill_(0.1)
    found = compared(network("gpt2"), hf_stitch.load(model.eval(), processor=plain_tokenizer()), TEXTS)
    assert [part.name for part in found.parts if part.weights.change] == ["lm_head"]
    assert [part.name for part in found.parts if part.effect is not None] == ["lm_head"]


def test_a_tied_group_has_all_its_names() -> None:
    model = build("gpt2", 0)
    model.lm_head.weight.data[3] += 1
    found = compared(network("gpt2"), adapted("gpt2", model), TEXTS)
    (part,) = (part for part in found.parts if part.weights.change)
    assert (part.name, part.tied) == ("transformer.wte", ("lm_head",))
    assert "transformer.wte (tied to lm_head)" in found.verdict
    assert "lm_head" in set(found.to_pandas()["tied"])


def test_a_weight_that_is_tied_in_one_network_only() -> None:
    b = build("gpt2", 0)
    b.lm_head.weight = nn.Parameter(rounded(b, 127).lm_head.weight.data.clone())
    found = compared(network("gpt2"), hf_stitch.load(b, processor=plain_tokenizer()), TEXTS)
    assert not found.causes


class Odd(nn.Module):
    """Weights that are no tensors of layers: a number, a list, a buffer; and a layer that overwrites its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.gate, self.many = nn.Parameter(torch.tensor(1.0)), nn.ParameterList([torch.ones(8), torch.ones(8)])
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x - self.shift) * self.many[0] * self.gate
        return self.head(torch.relu_(hidden) + self.second(hidden) * self.many[1])


@pytest.mark.parametrize("name", ["gate", "many", "shift"])
def test_weights_outside_of_layers_are_compared(name: str) -> None:
    torch.manual_seed(0)
    a, b = Odd(), Odd()
    b.load_state_dict(a.state_dict())
    changed = b.many[1] if name == "many" else getattr(b, name)
    changed.data += 3
    data = torch.randn(40, 4)
    found = compared(*(hf_stitch.load(each, example_inputs=data[:2]) for each in (a, b)), data)
    shares = {part.name: part.effect.share.value for part in found.parts if part.effect is not None}
    assert shares == {name: pytest.approx(1)} and found.weights.change > 0


def test_a_change_of_code_between_parts_is_told() -> None:
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    b = copy.deepcopy(a)
    b[1] = nn.Sigmoid()
    data = torch.randn(40, 4)
    a_, b_ = (
        hf_stitch.load(each, example_inputs=data[:2].to(next(each.parameters()).dtype)) for each in (a, b.bfloat16())
    )
    found = compared(a_, b_, data)
    assert found.verdict.startswith("100% of the change is outside of all parts")


class Overwriting(nn.Linear):
    """A layer that overwrites its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu_(x))


class Sharing(nn.Module):
    """A network that adds what a layer has overwritten to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(4, 8), Overwriting(8, 8)
        self.last, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(self.last(self.block(x) + x).tanh())


def test_networks_that_cannot_go_on_from_known_outputs_run_whole() -> None:
    torch.manual_seed(0)
    a, b = Sharing(), Sharing()
    b.load_state_dict(a.state_dict())
    b.last.weight.data += 1e-3
    data = torch.randn(40, 4)
    found = compared(*(hf_stitch.load(each, example_inputs=data[:2]) for each in (a, b)), data)
    assert not found.curves and any("cannot continue" in note for note in found.notes)
    effect = next(part.effect for part in found.parts if part.name == "last")
    assert effect is not None and effect.share.value == pytest.approx(1)


def test_a_text_of_one_token_has_no_next_token() -> None:
    found = compared(
        network("gpt2"), adapted("gpt2", edited("gpt2", LAYERS["gpt2"])), [WORDS[0], *TEXTS[:5]], batch_size=1
    )
    assert found.outputs is not None and np.isfinite(found.outputs.scores["cross-entropy"][:2]).all()


def with_another_head(classes: int) -> Adapter:
    model = build("bert", 0)
    model.classifier, model.config.num_labels = nn.Linear(32, classes), classes
    return adapted("bert", model)


def not_finite() -> Adapter:
    model = build("bert", 0)
    model.classifier.weight.data[0, 0] = torch.nan
    return adapted("bert", model)


REFUSED: dict[str, tuple[Callable[[], Adapter], dict[str, Any], str]] = {
    "another architecture": (
        lambda: network("gpt2"), {}, "expected versions of one network, .* Compare activations with hf_stitch.compare",
    ),
    "weights that are not finite": (not_finite, {}, r"classifier.weight of the second network .* not finite"),
    "a part that is none": (
        lambda: network("bert"), {"data": TEXTS, "within": ["bert.encoder.layer.7"]},
        "'bert.encoder.layer.7', which is not a part of the network; did you mean",
    ),
    "no head": (
        lambda: hf_stitch.load(copy.deepcopy(network("bert").model).bert, processor=plain_tokenizer()),
        {"data": TEXTS}, "only one of the networks has a head",
    ),
    "another number of classes": (
        lambda: with_another_head(7), {"data": TEXTS}, r"got the shapes \(40, 3\) and \(40, 7\)",
    ),
}  # fmt: skip
"""What the second network is -> what makes it, options, and the message."""


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_compared_is_refused(what: str) -> None:
    make, options, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        compared(network("bert"), make(), **options)


def test_few_samples_have_no_intervals() -> None:
    found = compared(network("bert"), adapted("bert", edited("bert", LAYERS["bert"])), TEXTS[:5])
    assert found.outputs is not None and np.isnan(found.outputs.forth.low)
    assert not found.causes and any("at least 20 samples, got 5" in note for note in found.notes)
    assert found.verdict.startswith("bert.encoder.layer.1 alone carries 100% of the change; too few samples")


def test_labels_give_scores() -> None:
    a, b = network("bert"), adapted("bert", edited("bert", LAYERS["bert"]))
    labels = [int(a.forward(a.preprocess([text])).logits.argmax()) for text in TEXTS]
    found = compared(a, b, [{"text": text, "label": label} for text, label in zip(TEXTS, labels, strict=True)])
    assert found.outputs is not None and found.outputs.agreement is not None
    one, two, gap = found.outputs.scores["accuracy"]
    assert one == 1.0 and two == pytest.approx(found.outputs.agreement.value) and gap.value == pytest.approx(two - 1)
    assert {"cross-entropy", "calibration error", "confidence"} <= found.outputs.scores.keys()


# -- networks stay as they are -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["bert", "cnn"])
def test_networks_are_not_changed(family: str) -> None:
    models = build(family, 0), edited(family, LAYERS[family]).to(torch.bfloat16)
    before = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    state = torch.get_rng_state()
    compared(*(adapted(family, model) for model in models), data_of(family))
    assert torch.equal(torch.get_rng_state(), state)
    for model, weights in zip(models, before, strict=True):
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        assert all(value.dtype == weights[name].dtype for name, value in model.state_dict().items())
        assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


def test_networks_are_not_changed_by_an_error() -> None:
    model = edited("bert", LAYERS["bert"])
    calls = [0]

    def fail(module: nn.Module, args: Any, output: Any) -> None:
        calls[0] += 1
        if calls[0] >= 4:
            raise RuntimeError("broken")

    handle = model.bert.encoder.layer[1].register_forward_hook(fail)
    b = adapted("bert", model)
    a, calls[0] = network("bert"), 0
    modules = dict(a.model.named_modules()), dict(model.named_modules())
    with pytest.raises(RuntimeError, match="broken"):
        compared(a, b, TEXTS)
    handle.remove()
    assert (dict(a.model.named_modules()), dict(model.named_modules())) == modules
    assert not any("forward" in vars(module) for each in modules for module in each.values())


# -- result and command ------------------------------------------------------------------------------------------------
def test_a_result_survives_its_file(tmp_path: Path) -> None:
    found = compared(network("bert"), adapted("bert", edited("bert", LAYERS["bert"])), TEXTS)
    found.save(tmp_path / "diff.json")
    again = Difference.load(tmp_path / "diff.json")
    assert str(again) == str(found)
    frame = again.to_pandas()
    assert list(frame["part"]) == [part.name for part in found.parts] and (frame["causal"] == True).sum() == 1  # noqa: E712
    found.named("base", "tuned").to_html(tmp_path / "diff.html")
    page = (tmp_path / "diff.html").read_text()
    assert "What changed from base to tuned" in page and "base up to here, then tuned" in page
    assert found.plot().axes


def test_the_command_conforms(code: Path) -> None:
    check_command(command, f"{code}:net", f"{code}:net")


@pytest.mark.parametrize(("second", "bound", "status"), [
    ("tuned", None, 0), ("tuned", "KL=.01", 1), ("net", "KL=.01", 0), ("tuned", "KLL=1", 2), ("tuned", "KL", 2),
])  # fmt: skip
def test_the_command_ends_with_what_it_found(
    code: Path, second: str, bound: str | None, status: int, tmp_path: Path
) -> None:
    page = tmp_path / "diff.html"
    data = ["--data", "sklearn:digits", "--split", "test", "--max-samples", "40", "--report", str(page)]
    bounds = [] if bound is None else ["--fail-above", bound]
    found = CliRunner().invoke(app, ["diff", f"{code}:net", f"{code}:{second}", *data, *bounds])
    assert found.exit_code == status, (found.output, found.exception)
    assert page.exists() == (status < 2)
    assert ("is" in found.output and "above 0.01" in found.output) == (status == 1)


def test_a_bound_on_outputs_needs_data(code: Path) -> None:
    found = CliRunner().invoke(app, ["diff", f"{code}:net", f"{code}:tuned", "--fail-above", "KL=.01"])
    assert found.exit_code == 2 and "requires" in found.output


SCRIPT = """
import runpy, sys
import torch, hf_stitch
from hf_stitch_versions import diff

nets = runpy.run_path(sys.argv[1])
data = hf_stitch.data.read_data("sklearn:digits", split="test")
a, b = (hf_stitch.load(each[0], processor=each[1], example_inputs=torch.randn(2, 1, 8, 8))
        for each in (nets["net"](), nets["tuned"]()))
found = diff(a, b, data, batch_size=40, progress=False)
print(found.n, *(f"{part.effect.patch} {part.effect.local:.6g} {part.move and part.move.affine:.5g}"
      for part in found.parts if part.effect), flush=True)
"""


def test_two_processes_find_what_one_does(code: Path, alone_and_launched: Callable[..., str]) -> None:
    alone_and_launched(SCRIPT, code)


@pytest.mark.parametrize("shape", [(6, 8), (6, 5, 8), (6, 8, 2, 2)])
def test_moments_of_blocks_have_the_dtype_in_which_they_were_computed(shape: tuple[int, ...]) -> None:
    moved = Moved()
    moved.add("block", torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16(), None)
    assert moved.moments["block"][0].eps.tolist() == [torch.finfo(torch.bfloat16).eps] * 2


def test_maps_are_judged_on_samples_that_they_have_not_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    own, other = (torch.randn(60, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    moved = Moved()
    for rows in torch.arange(60).split(7):
        moved.add("block", own[rows], other[rows], None)
    found = moved.move("block")
    assert found is not None
    x, y, unseen_x, unseen_y = other[::2], own[::2], other[1::2], own[1::2]
    left, _, right = torch.linalg.svd((x - x.mean(0)).T @ (y - y.mean(0)))
    mapped = (unseen_x - x.mean(0)) @ left @ right + y.mean(0)
    errors = [float((each - unseen_y).square().sum()) for each in (unseen_x, mapped)]
    variance = float((unseen_y - unseen_y.mean(0)).square().sum())
    assert (found.error, found.orthogonal) == pytest.approx([error / variance for error in errors])
    assert found.affine > 1  # unrelated activations tell nothing about each other
