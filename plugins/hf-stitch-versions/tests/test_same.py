"""``same`` finds the module of a planted bug, and nothing in honest pairs."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import honest
import planted
import pytest
import torch
from hf_stitch_testing import check_command
from hf_stitch_versions import Sameness, diff, diff_all, same
from hf_stitch_versions.cli import same as command
from hf_stitch_versions.recording import Event
from hf_stitch_versions.sameness.distances import Deviation
from planted import TABLE, first, loaded
from torch import nn
from typer.testing import CliRunner

import hf_stitch
from hf_stitch import Activations, Adapter
from hf_stitch.cli import app

from tests.forms import form_of  # isort: skip
from tests.tiny_networks import WORDS, build, other_tokenizer, plain_tokenizer  # isort: skip

TEXTS = honest.TEXT[:6]


def compared(a: Any, b: Any, data: Any = None, **options: Any) -> Sameness:
    return same(a, b, data, progress=False, **options)


def with_bugs(family: str, *bugs: str) -> Adapter:
    model = copy.deepcopy(first(family).model)
    for bug in bugs:
        make, name = TABLE[family][bug]
        make(model, name)
    return loaded(family, model)


# -- bugs --------------------------------------------------------------------------------------------------------------
FEW_BUGS = [
    ("roberta", "positions", ""),
    ("t5", "buckets", ""),
    ("swin", "mask of the shift", ""),
    ("cnn", "padding", ""),
    ("llama", "mask in attention", "eager"),
    ("bert", "transposed", "bfloat16"),
]


@pytest.mark.parametrize(("family", "bug", "beside"), FEW_BUGS)
def test_the_module_of_a_bug_is_named(family: str, bug: str, beside: str) -> None:
    pair = planted.plant(family, bug, beside)
    assert pair.shows
    found = compared(pair.a, pair.b)
    assert found.findings[0].module == pair.answer
    assert not found.is_same and found.complete
    assert pair.answer in found.verdict


class Padded(nn.Module):
    """User code with ``nn.TransformerEncoder``, or with nested tensors of its own."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.words, self.last, self.nested = nn.Embedding(50, 16), nn.Linear(16, 3), nested
        self.encoder = nn.Sequential(nn.Linear(16, 16), nn.ReLU()) if nested else nn.TransformerEncoder(layer, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        if self.nested:
            x = torch._nested_tensor_from_mask(x, attention_mask.bool(), mask_check=False)
            return self.last(self.encoder(x).to_padded_tensor(0.0)[:, 0])
        return self.last(self.encoder(x, src_key_padding_mask=attention_mask == 0)[:, 0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("nested", "module"), [(False, "encoder.layers.1.linear1"), (True, "encoder.0")])
def test_networks_that_pass_nested_tensors_are_compared(nested: bool, module: str) -> None:
    torch.manual_seed(0)
    net = Padded(nested).eval()
    port = copy.deepcopy(net)
    example = {"input_ids": torch.randint(1, 50, (2, 6)), "attention_mask": torch.tensor([[1] * 6, [1] * 3 + [0] * 3])}
    a, b = (hf_stitch.load(each, example_inputs=example) for each in (net, port))
    assert compared(a, b).is_same
    with torch.no_grad():
        port.get_submodule(module).weight.mul_(1.1)
    assert compared(a, b).findings[0].module == module


def test_several_bugs_are_found_in_their_order() -> None:
    bugs = ("head", "tanh for erf", "bf16", "patches transposed")
    found = compared(first("vit"), with_bugs("vit", *bugs))
    order = ("patches transposed", "tanh for erf", "bf16", "head")
    assert [finding.module for finding in found.findings] == [TABLE["vit"][bug][1] for bug in order]
    assert found.complete
    assert [finding.restored for finding in found.findings] == [False, False, False, True]
    assert found.modules[-1].ratio > 4 > found.modules[-1].repaired / found.modules[-1].null


@pytest.mark.parametrize("count", [9, 49])
def test_one_wrong_setting_at_many_places_is_one_finding(count: int) -> None:
    def net(eps: float) -> nn.Module:
        torch.manual_seed(0)
        layers = [each for _ in range(count) for each in (nn.Linear(6, 6), nn.LayerNorm(6, eps))]
        return nn.Sequential(*layers, nn.Linear(6, 2)).eval()

    wrong = net(1e-3)
    data = torch.randn(16, 6)
    a, b = (hf_stitch.load(each, example_inputs=data[:2]) for each in (net(1e-5), wrong))
    found = compared(a, b, data)
    (finding,) = found.findings
    assert finding.places == tuple(str(2 * place + 1) for place in range(count)) and finding.module == "1"
    assert finding.restored and found.complete and f"and {count - 1} more that differ in the same way" in found.verdict
    wrong[7].weight.data += 1
    found = compared(a, b, data)
    assert [len(each.places) for each in found.findings] == [count - 1, 0] and found.complete
    assert found.findings[1].module == "7" and found.findings[1].weights


class Layer(nn.Linear):
    """Another class, which computes the same."""


def test_modules_that_differ_in_their_class_only_are_not_told_with_one_that_computes_something_else() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5))).eval()
    port = copy.deepcopy(net)
    for layer in port.children():
        layer.__class__ = Layer
    port[2].forward = lambda x: nn.functional.linear(x, port[2].weight)
    data = torch.randn(16, 6)
    (finding,) = compared(*(hf_stitch.load(each, example_inputs=data[:2]) for each in (net, port)), data).findings
    assert finding.module == "2" and not finding.places


def test_the_number_of_findings_is_told_where_the_search_stops() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(10))).eval()

    wrong = net()
    for number, layer in enumerate(wrong.children()):
        layer.weight.data += 0.01 * number + 0.01
    data = torch.randn(16, 6)
    found = compared(*(hf_stitch.load(each, example_inputs=data[:2]) for each in (net(), wrong)), data)
    assert len(found.findings) == 8 and not found.complete and not any(each.places for each in found.findings)
    assert found.verdict.endswith("The search stopped after 8 findings; the networks still differ.")


class Packed(nn.Linear):
    """A linear layer of 4 bits, two in a byte, in one column, as that of bitsandbytes."""

    @classmethod
    def pack(cls, layer: nn.Linear) -> None:
        step = layer.weight.abs().max() / 7
        levels = ((layer.weight.data / step).round() + 8).to(torch.uint8).view(-1, 2)
        layer.weight = nn.Parameter((levels[:, :1] * 16 + levels[:, 1:]).contiguous(), requires_grad=False)
        layer.__class__, layer.step = cls, step.detach()

    def numbers(self) -> torch.Tensor:
        levels = torch.cat([self.weight // 16, self.weight % 16], 1).view(self.out_features, self.in_features)
        return (levels.to(torch.float32) - 8) * self.step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.numbers().to(x.dtype), self.bias)


def packed(model: nn.Module) -> nn.Module:
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            Packed.pack(module)
    return model


QUANTISED = {"packed": "Packed", "layer of integers": "LinearOfIntegers", "tensor subclass": "Int8", "int8": "Linear"}
"""Form -> the class that keeps its integers."""


@pytest.mark.parametrize("form", QUANTISED)
def test_of_quantised_weights_the_relative_change_is_told(form: str) -> None:
    plain = build("vit", 0)
    model = packed(build("vit", 0)) if form == "packed" else form_of("vit", form)
    found = compared(loaded("vit", plain), loaded("vit", model), honest.PICTURES)
    assert not found.is_same and found.quantized.startswith("The second network is quantized: ")
    assert f"are integers ({QUANTISED[form]})" in found.verdict and "of their norm" in found.verdict
    finding = found.findings[0]
    assert finding.weights[0].startswith("weight differs by 0.") and finding.weights[0].endswith(" of its norm")
    assert len(finding.places) > 5 and found.complete, finding
    again = compared(loaded("vit", model), loaded("vit", copy.deepcopy(model)), honest.PICTURES)
    assert again.is_same and not again.quantized


def test_what_differs_is_told() -> None:
    found = compared(first("vit"), with_bugs("vit", "transposed", "eps of the first norm", "no bias"))
    eps, transposed, bias = found.findings
    assert eps.settings == ("eps 1e-12 against 1e-05",) and not eps.weights
    assert transposed.weights == ("weight is transposed",)
    assert bias.weights == ("bias is missing",)


def test_the_mask_that_a_module_makes_is_told() -> None:
    (finding,) = compared(first("bert"), with_bugs("bert", "mask at the top")).findings
    assert finding.masks > 0
    assert "the mask that it makes differs" in finding.cause


def test_a_mask_on_one_side_only_is_one_that_hides_something() -> None:
    family, model = "llama", copy.deepcopy(first("llama").model)
    planted.mask_at_top(model, "model")
    a, b = (hf_stitch.load(each, processor=plain_tokenizer()) for each in (first(family).model, model))
    texts = [" ".join(WORDS[i : i + 5]) for i in range(4)]  # all of one length: there is no mask in the first
    assert [finding.module for finding in compared(a, b, texts).findings] == ["model"]


def test_a_bug_in_a_port_with_other_names_is_named() -> None:
    port = honest.plain_bert(first("bert").model)
    port.blocks[1].norm_mlp.eps = 1e-3
    other = hf_stitch.load(port, processor=plain_tokenizer(), example_inputs=dict(honest.IDS))
    (finding,) = compared(first("bert"), other).findings
    assert (finding.module, finding.other) == ("bert.encoder.layer.1.output.LayerNorm", "blocks.1.norm_mlp")
    assert finding.settings == ("eps 1e-12 against 0.001",) and finding.restored


def test_not_a_number_on_one_side_is_a_difference() -> None:
    model = copy.deepcopy(first("vit").model)
    with torch.no_grad():
        model.get_parameter("vit.layers.1.mlp.fc1.bias")[3] = torch.nan
    for a, b in ((first("vit"), loaded("vit", model)), (loaded("vit", model), first("vit"))):
        found = compared(a, b)
        assert found.findings[0].module == "vit.layers.1.mlp.fc1"
        assert found.findings[0].ratio == torch.inf
    assert compared(loaded("vit", model), loaded("vit", copy.deepcopy(model))).is_same


# -- honest pairs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", honest.TABLE)
def test_an_honest_pair_is_the_same(kind: str) -> None:
    pair = honest.pair(kind, honest.TABLE[kind][1][0])
    found = compared(pair.a, pair.b, pair.data, **pair.options)
    assert found.is_same, found.verdict
    assert found.by_names == (kind not in ("timm", "port"))


def test_layers_that_were_fused_are_the_same_from_outside() -> None:
    class Block(nn.Sequential):
        pass

    def norm() -> nn.BatchNorm2d:
        made = nn.BatchNorm2d(6)
        nn.init.normal_(made.running_mean), nn.init.uniform_(made.running_var, 0.5, 2)
        return made

    model = nn.Sequential(Block(nn.Conv2d(3, 6, 3), norm(), nn.ReLU()), nn.Flatten(), nn.Linear(96, 4)).eval()
    fused = copy.deepcopy(model)
    fused[0][0] = torch.nn.utils.fuse_conv_bn_eval(fused[0][0], fused[0][1])
    fused[0][1] = nn.Identity()
    wrong = copy.deepcopy(model)
    wrong[0][0].bias.data += 0.1
    wrong[0][2] = nn.Hardtanh(-1e9, -1e8)  # hides everything behind it
    images = torch.randn(4, 3, 6, 6)
    a, b, c = (hf_stitch.load(each, example_inputs=images) for each in (model, fused, wrong))
    found = compared(a, b, images)
    assert found.is_same and found.inside == ("0.0",)
    assert compared(a, c, images).findings[0].module == "0.0"


def test_a_setting_with_less_effect_than_rounding_is_told() -> None:
    found = compared(first("gpt2"), with_bugs("gpt2", "eps"))
    assert found.is_same
    assert f"Settings differ: {TABLE['gpt2']['eps'][1]}: eps 1e-05 against 1e-06." in found.verdict


def test_code_that_torch_compile_returns_is_compared_too() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return lambda *given: tuple(1.01 * each for each in graph(*given))

    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).eval()
    code = torch.compile(copy.deepcopy(model), backend=backend)
    data = torch.randn(8, 4)
    found = same(hf_stitch.load(model, example_inputs=data), code, data, progress=False)
    assert [finding.module for finding in found.findings] == ["compiled code"]
    assert "so it is the operation" in found.verdict and "nothing of it is left" not in found.verdict


def test_compiled_code_is_compared_too() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).eval()
    code = copy.deepcopy(model)
    code.compile(backend="eager")
    found = compared(*(hf_stitch.load(each, example_inputs=torch.randn(2, 4)) for each in (model, code)))
    assert found.is_same
    assert found.modules[-1].name == "compiled code"
    whole = torch.compile(copy.deepcopy(first("vit").model), backend="eager")  # which has no length
    assert compared(first("vit"), whole).is_same


def test_attention_that_is_not_finite_in_float64_is_no_difference() -> None:
    """Eager attention of Llama makes NaN of padding on the left, but in float64 only."""
    assert compared(first("llama"), honest.pair("eager", "llama").b, seed=3).is_same


def test_a_network_is_equal_to_itself() -> None:
    found = compared(first("vit"), first("vit"))
    assert found.is_same and {row.ratio for row in found.modules} == {0.0}
    assert len(found.modules) > 40 and not found.missing and not found.extra


def test_nothing_of_the_networks_is_changed() -> None:
    models = [copy.deepcopy(first("vit").model), copy.deepcopy(first("vit").model).bfloat16()]
    planted.transposed(models[1], "vit.layers.1.attention.v_proj")
    for model in models:
        model.train()
        model.get_submodule("vit.layers.2").eval()
    before = [copy.deepcopy(model.state_dict()) for model in models]
    modes = [[module.training for module in model.modules()] for model in models]
    state = torch.get_rng_state()
    assert not compared(*(loaded("vit", model) for model in models)).is_same
    assert torch.equal(torch.get_rng_state(), state)
    assert [[module.training for module in model.modules()] for model in models] == modes
    for model, weights in zip(models, before, strict=True):
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        assert all(value.dtype == weights[name].dtype for name, value in model.state_dict().items())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# -- processes ---------------------------------------------------------------------------------------------------------
SCRIPT = """
import sys
import torch, hf_stitch
from hf_stitch_versions import same
from torch.nn import LayerNorm, Linear, Sequential

torch.manual_seed(0)
net, port = (Sequential(Linear(4, 8), LayerNorm(8, eps=eps), Linear(8, 2)) for eps in (1e-5, 1e-3))
port.load_state_dict(net.state_dict())
data = torch.randn(20, 4)
a, b = (hf_stitch.load(each, example_inputs=data[:2]) for each in (net, port))
for given in (data, None):
    found = same(a, b, given, batch_size=4, progress=False)
    print(found.n, [finding.module for finding in found.findings], f"{found.modules[-1].ratio:.6g}", flush=True)
"""


def test_two_processes_find_what_one_does(alone_and_launched: Callable[..., str]) -> None:
    assert alone_and_launched(SCRIPT).startswith("20 ['1'] ")


class Shifted(nn.Module):
    """What loses digits on its way: many in float64, all in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1e11) - 1e11


def test_rounding_of_either_network_is_part_of_the_null() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Identity(), nn.Linear(8, 3)).eval()
    coarse = copy.deepcopy(plain)
    coarse[1] = Shifted()
    data = torch.randn(20, 6)
    one, other = (hf_stitch.load(each, example_inputs=data[:2]) for each in (plain, coarse))
    for pair in ((one, other), (other, one)):
        found = compared(*pair, data)
        assert found.is_same and found.modules[1].difference > 1e-6, found.verdict


def test_masks_are_compared_at_queries_of_real_tokens() -> None:
    real, everything = torch.tensor([[False, True, True]]), torch.ones(1, 1, 3, 3, dtype=torch.bool)
    for query, differ in ((0, 0), (2, 1)):
        other = everything.clone()
        other[..., query, 0] = False
        deviation = Deviation()
        events = (Event(("", 0), "", {}, masks={"mask": each}) for each in (everything, other))
        deviation.add(*events, real)
        assert deviation.masks == (differ, 6)


# -- vocabularies ------------------------------------------------------------------------------------------------------
def with_tokens(rows: int, words: int = 60) -> Adapter:
    """A decoder with embeddings of some rows, and a tokenizer of some words."""
    model = copy.deepcopy(first("gpt2").model)
    model.resize_token_embeddings(rows, mean_resizing=False)
    tokenizer = plain_tokenizer()
    tokenizer.add_tokens([f"new{place}" for place in range(words - 60)])
    return hf_stitch.load(model, processor=tokenizer)


@pytest.mark.parametrize("backwards", [False, True])
def test_random_texts_have_tokens_that_both_networks_know(backwards: bool) -> None:
    pair = [with_tokens(80), with_tokens(95)]
    found = compared(*(pair[::-1] if backwards else pair))
    assert found.findings[0].module == "lm_head"
    assert found.findings[0].weights[0].startswith("weight has shape ")


@pytest.mark.parametrize("job", [same, diff, diff_all])
def test_tokens_that_the_second_network_does_not_know_are_refused_by_name(job: Any) -> None:
    longer, shorter = with_tokens(95, 75), with_tokens(70)
    given = ({"a": longer, "b": shorter},) if job is diff_all else (longer, shorter)
    message = (
        r"sample 1 has the token id 7\d from the first network's tokenizer \(\w+ of 79 tokens\), but "
        r"the second network \(tokenizer: \w+ of 64 tokens\) has embeddings of 70 tokens. Omit"
    )
    with pytest.raises(ValueError, match=message):
        job(*given, [WORDS[0], "new14", "new13"], progress=False)
    assert not same(longer, shorter, [WORDS[0], "new1"], progress=False).is_same


# -- inputs and refusals -----------------------------------------------------------------------------------------------
def left_padded() -> Any:
    tokenizer = plain_tokenizer()
    tokenizer.padding_side = "left"
    return tokenizer


@pytest.mark.parametrize(
    ("family", "tokenizer", "told"),
    [
        ("bert", other_tokenizer, "input_ids differs in sample 0 at 0: "),
        ("gpt2", left_padded, "padding is on the opposite side"),
    ],
)
def test_other_inputs_are_told(family: str, tokenizer: Callable[[], Any], told: str) -> None:
    other = hf_stitch.load(copy.deepcopy(first(family).model), processor=tokenizer())
    found = compared(first(family), other, TEXTS)
    assert not found.is_same and not found.findings and found.complete
    assert found.inputs[0].startswith(told)
    assert found.verdict.endswith("On the same inputs, the networks are the same.")


def test_inputs_of_later_batches_are_told() -> None:
    tokenizer, texts = plain_tokenizer(), [WORDS[0]] * 2 + [WORDS[1]] * 2
    plan = json.loads(tokenizer.backend_tokenizer.to_str())
    ids = plan["model"]["vocab"]
    ids[WORDS[1]], ids[WORDS[2]] = ids[WORDS[2]], ids[WORDS[1]]
    tokenizer.backend_tokenizer.model = type(tokenizer.backend_tokenizer.model)(ids, unk_token="[UNK]")
    other = hf_stitch.load(copy.deepcopy(first("bert").model), processor=tokenizer)
    found = compared(first("bert"), other, texts, batch_size=2)
    assert not found.is_same and found.inputs[0].startswith("input_ids differs in sample 2 at 0: ")


def test_inputs_rounded_to_the_dtype_of_a_network_are_no_difference() -> None:
    model = copy.deepcopy(first("vit").model).bfloat16()
    assert compared(first("vit"), loaded("vit", model), honest.PICTURES).is_same


def test_tied_weights_and_attributes_that_hold_tensors_are_no_difference() -> None:
    class Net(nn.Module):
        def __init__(self, tied: bool, scale: float) -> None:
            super().__init__()
            self.one, self.two, self.scale, self.held = nn.Linear(4, 4), nn.Linear(4, 4), scale, (torch.ones(3),)
            for layer in (self.one, self.two):
                nn.init.eye_(layer.weight)
                nn.init.zeros_(layer.bias)
            if tied:
                self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x)) * self.scale

    nets = [hf_stitch.load(Net(*each), example_inputs=torch.randn(2, 4)) for each in ((True, 1.0), (False, 2.0))]
    (finding,) = compared(*nets).findings
    assert not finding.weights and finding.settings == ("scale 1.0 against 2.0",)


RAGGED = [" ".join(WORDS[(7 * i + 3 * j) % 60] for j in range(2 + i // 2)) for i in range(16)]


@pytest.mark.parametrize(("bug", "same_as_first"), [("eps", True), ("no bias", False)])
def test_neither_batches_nor_the_order_of_padded_texts_count(bug: str, same_as_first: bool) -> None:
    pair = [hf_stitch.load(each.model, processor=left_padded()) for each in (first("gpt2"), with_bugs("gpt2", bug))]
    assert not pair[0].preprocess(RAGGED[:8])["attention_mask"][:, 0].all()
    shuffled = random.Random(0).sample(RAGGED, len(RAGGED))
    alone = compared(*pair, RAGGED, batch_size=1)
    assert alone.is_same == same_as_first
    for texts, size in ((RAGGED, 8), (RAGGED, 64), (shuffled, 8)):
        found = compared(*pair, texts, batch_size=size)
        assert (found.is_same, found.n, found.inputs) == (alone.is_same, len(RAGGED), ())
        assert [(each.module, each.seen_at) for each in found.findings] == [
            (each.module, each.seen_at) for each in alone.findings
        ]
        assert [each.name for each in found.modules] == [each.name for each in alone.modules]
        for one, other in zip(alone.modules, found.modules, strict=True):
            assert other.difference == pytest.approx(one.difference, rel=1e-9, abs=1e-15), one.name
            # the null is rounding, and varies
            assert other.ratio == pytest.approx(one.ratio, rel=0.1, abs=1e-6), one.name


def line(width: int) -> Adapter:
    net = nn.Sequential(nn.Linear(width, 3), nn.ReLU())
    return hf_stitch.load(net, example_inputs=torch.randn(2, width))


def narrow_vit() -> Adapter:
    wide = build("vit", 0)
    return loaded("vit", type(wide)(type(wide.config)(**{**wide.config.to_dict(), "hidden_size": 16})).eval())


OTHERS = hf_stitch.Samples.of(honest.PICTURES[:2], id=("a", "b"))
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], Any], Any, str]] = {
    "inputs that it does not take": (
        lambda: line(4), lambda: line(7), None,
        "the second network does not run on the inputs of the first: RuntimeError",
    ),
    "other widths": (
        lambda: loaded("vit", build("vit", 0)), narrow_vit, None,
        r"different widths.* Compare them with hf_stitch\.compare",
    ),
    "other networks": (lambda: first("vit"), lambda: first("cnn"), None, "expected versions of one network"),
    "activations of other samples": (
        lambda: first("vit"), lambda: honest.recorded("vit").b, OTHERS, "lack sample 'a'",
    ),
}  # fmt: skip
"""What the second network is -> what makes the two, the data, and the message."""


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_compared_is_refused(what: str) -> None:
    one, two, data, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        compared(one(), two(), data)


def test_recorded_activations_that_differ_are_found(tmp_path: Path) -> None:
    pair = honest.recorded("vit")
    values = {name: value.clone() for name, value in pair.b.values.items()}
    layers = list(values)
    values[layers[1]] += 1e-3
    Activations(values, pair.b.ids).save(tmp_path / "served.npz")
    found = compared(pair.a, tmp_path / "served.npz", pair.data)
    assert [finding.module for finding in found.findings] == layers[1:2]
    assert not compared(pair.a, Activations({layers[1]: values[layers[1]]}, pair.b.ids), pair.data).is_same
    with pytest.raises(ValueError, match="none of their modules could be paired"):
        compared(pair.a, Activations({"other": values[layers[1]]}, pair.b.ids), pair.data)


# -- results -----------------------------------------------------------------------------------------------------------
def test_a_result_is_saved_printed_and_shown(tmp_path: Path) -> None:
    found = compared(first("vit"), with_bugs("vit", "transposed", "tanh for erf"))
    found.save(tmp_path / "same.json")
    again = Sameness.load(tmp_path / "same.json")
    assert again == found and again.verdict == found.verdict
    assert json.loads((tmp_path / "same.json").read_text())["is_same"] is False
    hf_stitch.report(found, tmp_path / "same.html")
    assert hf_stitch.load_report(tmp_path / "same.html") == [found]
    assert "vit.layers.1.attention.v_proj" in str(found)
    table = found.to_pandas()
    assert len(table) == len(found.modules) and (table.ratio > 4).any() and not (table.repaired > 4 * table.null).any()
    assert found.plot().axes[0].get_yscale() == "log"


# -- the command -------------------------------------------------------------------------------------------------------
CODE = """
import torch
from torch import nn
import hf_stitch

def net(eps=1e-5, width=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width, eps), nn.Linear(width, width)).eval()
    return hf_stitch.load(model, example_inputs=torch.randn(2, 4))

def port():
    return net(1e-3)

def narrow():
    return net(width=6)
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(CODE)
    return tmp_path / "nets.py"


def test_the_command_conforms(code: Path) -> None:
    check_command(command, f"{code}:net", f"{code}:net")


@pytest.mark.parametrize(("second", "status"), [("net", 0), ("port", 1), ("narrow", 2)])
def test_the_command_ends_with_what_it_found(code: Path, second: str, status: int, tmp_path: Path) -> None:
    page = tmp_path / "same.html"
    found = CliRunner().invoke(app, ["same", f"{code}:net", f"{code}:{second}", "--report", str(page)])
    assert found.exit_code == status, (found.output, found.exception)
    assert page.exists() == (status < 2)
    assert "Traceback" not in found.output


# -- the whole corpus --------------------------------------------------------------------------------------------------
def test_most_bugs_are_named_exactly() -> None:
    named, missed = 0, []
    for each in planted.names()[::2]:  # all of them: python -m benchmarks same
        pair = planted.plant(*each)
        if pair.shows:
            found = compared(pair.a, pair.b)
            exact = [finding.module for finding in found.findings][:1] == [pair.answer]
            named += exact
            missed += [] if exact else [(pair.family, pair.bug, found.verdict)]
    assert named + len(missed) >= 60
    assert named >= 0.95 * (named + len(missed)), missed


def test_honest_pairs_are_the_same() -> None:
    flagged = []
    for each in honest.names():
        pair = honest.pair(*each)
        found = compared(pair.a, pair.b, pair.data, **pair.options)
        flagged += [] if found.is_same else [(each, found.verdict)]
    assert len(honest.names()) >= 60
    assert len(flagged) <= 1, flagged
