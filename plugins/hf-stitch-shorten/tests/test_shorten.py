"""Shorter networks: the maps against their definitions, plain networks against mapped ones, and what is refused."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from hf_stitch_shorten import CannotBeRebuiltError, Shortened, shorten
from hf_stitch_shorten.maps import Fits, Moments, add_to, input_rows
from hf_stitch_shorten.search import Search
from hf_stitch_shorten.stacks import joint_of, rows_of, run, stacks
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D
from typer.testing import CliRunner

import hf_stitch
from hf_stitch import Adapter, Samples
from hf_stitch.cli import app
from hf_stitch.running import WITHOUT_STATE, Run

from tests.forms import REFUSED, adapter_of, form_of  # isort: skip
from tests.tiny_networks import BODY, CLASSES, SIZE, TEXT, WORDS, network, plain_tokenizer  # isort: skip

ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DEEP = {**TEXT, "num_hidden_layers": 6}
QUIET: dict[str, Any] = {"progress": False}


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS[:40], k=draw.randint(4, 12))) for _ in range(count)]


def images(count: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(3, SIZE, SIZE, generator=draw) for _ in range(count)]


class Residual(nn.Module):
    """A block as in the CIFAR ResNets, which ends with a function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = (nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x))))))


def built(family: str) -> Adapter:
    """A network with stacks that are deep enough."""
    torch.manual_seed(0)
    match family:
        case "resnet of functions":
            stem = nn.Conv2d(3, 8, 3, 2, padding=1)
            blocks = nn.Sequential(*(Residual(8) for _ in range(4)))
            model = nn.Sequential(stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)).train()
            model(torch.stack(images(16)))  # running statistics
        case "timm resnet":
            model = timm.create_model("resnet10t", layers=(1, 3, 1, 1), channels=(8, 8, 16, 16), num_classes=CLASSES)
            for name, value in model.named_parameters():
                value.data.uniform_(0.5, 1) if name.endswith("bn2.weight") else None  # 0 at first
        case "timm convnext":
            model = timm.create_model("convnext_atto", depths=(1, 3, 1, 1), dims=(16, 24, 32, 32), num_classes=CLASSES)
            for name, value in model.named_parameters():
                value.data.uniform_(0.2, 0.5) if name.endswith("gamma") else None  # of layer scales, 1e-6 at first
        case "resnet":
            config = transformers.ResNetConfig(
                embedding_size=8, hidden_sizes=[8, 16], depths=[3, 2], layer_type="basic", num_labels=CLASSES
            )
            model = transformers.ResNetForImageClassification(config)
        case "opt":
            config = transformers.OPTConfig(**ENDS, vocab_size=80, hidden_size=32, ffn_dim=48, num_hidden_layers=4,
                                            num_attention_heads=4, word_embed_proj_dim=32)  # fmt: skip
            model = transformers.OPTForCausalLM(config)
        case "phi":
            config = transformers.PhiConfig(**{**TEXT, "num_hidden_layers": 4}, **ENDS)
            model = transformers.PhiForCausalLM(config)
        case "qwen":
            config = transformers.Qwen2Config(**{**TEXT, "num_hidden_layers": 4}, num_key_value_heads=2, **ENDS)
            model = transformers.Qwen2ForCausalLM(config)
        case "gemma2":
            config = transformers.Gemma2Config(**{**TEXT, "num_hidden_layers": 4}, num_key_value_heads=2, head_dim=8,
                                               **ENDS)  # fmt: skip
            model = transformers.Gemma2ForCausalLM(config)
        case "clip":
            config = transformers.CLIPVisionConfig(**BODY, image_size=SIZE, patch_size=8)
            model = transformers.CLIPVisionModel(config)
        case "masked":
            model = transformers.BertForMaskedLM(transformers.BertConfig(**DEEP))
        case "albert":
            config = transformers.AlbertConfig(**TEXT, embedding_size=16)
            model = transformers.AlbertForSequenceClassification(config)
        case _:
            return network(family)
    model = model.eval()
    if family in ("opt", "phi", "qwen", "gemma2", "masked", "albert"):
        processor = plain_tokenizer()
        if family == "masked":
            processor.add_special_tokens({"mask_token": "[MASK]"})
            model.resize_token_embeddings(len(processor))
        return hf_stitch.load(model, processor=processor)
    example = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    return hf_stitch.load(model, example_inputs=example)


def data_of(net: Adapter, count: int = 60) -> list[Any]:
    return texts(count) if net.interface.content[0] == "input_ids" else images(count)


def deep(family: str = "llama") -> Adapter:
    torch.manual_seed(1)
    match family:
        case "llama":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DEEP, **ENDS))
        case "bert":
            model = transformers.BertForSequenceClassification(transformers.BertConfig(**DEEP, num_labels=3))
    return hf_stitch.load(model.eval(), processor=plain_tokenizer())


# -- maps --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["linear", "linear without bias", "conv1d", "conv2d"])
def test_maps_are_what_their_definitions_say(kind: str) -> None:
    torch.manual_seed(0)
    projection: Any = {
        "linear": lambda: nn.Linear(6, 4), "linear without bias": lambda: nn.Linear(6, 4, bias=False),
        "conv1d": lambda: Conv1D(4, 6), "conv2d": lambda: nn.Conv2d(6, 4, 3, padding=1, bias=False),
    }[kind]()  # fmt: skip
    read = torch.randn(90, 6) + 1 if kind != "conv2d" else torch.randn(10, 6, 3, 3)
    rows = input_rows(projection, read).double()
    written = projection(read).double()
    written = written.movedim(1, -1).flatten(0, -2) if kind == "conv2d" else written
    lacks = torch.randn(len(rows), 4, dtype=torch.float64) + rows @ torch.randn(rows.shape[1], 4, dtype=torch.float64)
    fitted, held = Moments(), Moments()
    fitted.add(rows[:60], {"b": lacks[:60]})
    held.add(rows[60:], {"b": lacks[60:]})
    fits, has_bias = Fits(projection, torch.ones(4), fitted, held), projection.bias is not None

    found = fits.replaceme("b")  # ReplaceMe: y T ≈ y + d
    transform = torch.linalg.lstsq(written.detach(), written.detach() + lacks).solution
    change = written.detach() @ transform - written.detach()
    own = rows @ found.weight.T + (0 if found.bias is None else found.bias)
    assert torch.allclose(own, change, atol=1e-4, rtol=1e-3)

    found = fits.refit("b")
    assert found.penalty is not None
    mean, lack = (rows.mean(0), lacks.mean(0)) if has_bias else (torch.zeros(()), torch.zeros(()))
    centred, wanted = rows - mean, lacks - lack
    penalty = found.penalty * centred.square().sum(0).mean()
    root = penalty.sqrt() * torch.eye(rows.shape[1], dtype=torch.float64)
    wide, more = torch.cat((centred, root)), torch.cat((wanted, torch.zeros(rows.shape[1], 4, dtype=torch.float64)))
    expected = torch.linalg.lstsq(wide, more).solution.T
    assert torch.allclose(found.weight, expected, atol=1e-8)
    if has_bias:
        assert torch.allclose(found.bias, lack - expected @ mean, atol=1e-8)

    before = projection(read).detach()
    add_to(projection, found.weight, found.bias)
    after = (projection(read) - before).detach().double()
    after = after.movedim(1, -1).flatten(0, -2) if kind == "conv2d" else after
    assert torch.allclose(after, rows @ found.weight.T + (0 if found.bias is None else found.bias), atol=1e-4)


def test_what_cannot_be_predicted_changes_nothing() -> None:
    torch.manual_seed(0)
    fitted, held = Moments(), Moments()
    fitted.add(torch.randn(40, 30), {"b": torch.randn(40, 3)})
    held.add(torch.randn(4000, 30), {"b": torch.randn(4000, 3)})
    found = Fits(nn.Linear(30, 3), torch.ones(3), fitted, held).refit("b")
    assert found.weight.norm() < 0.2 and found.penalty in (None, 10.0)  # no change, or the greatest penalty


def test_sums_of_moments_are_moments_of_all_rows() -> None:
    rows, lacks = torch.randn(20, 3), {"b": torch.randn(20, 2)}
    parts = [Moments(), Moments(), Moments()]
    parts[0].add(rows[:7], {"b": lacks["b"][:7]})
    parts[1].add(rows[7:], {"b": lacks["b"][7:]})
    parts[2].add(rows, lacks)
    both = parts[0] + parts[1]
    assert both.count == 20 and torch.allclose(torch.as_tensor(both.inputs), torch.as_tensor(parts[2].inputs))
    assert torch.allclose(torch.as_tensor(both.cross["b"]), torch.as_tensor(parts[2].cross["b"]))


# -- blocks ------------------------------------------------------------------------------------------------------------
JOINTS = {
    "llama": ("mlp.down_proj", ""), "gpt2": ("mlp.c_proj", ""), "bert": ("output.dense", "output.LayerNorm"),
    "roberta": ("output.dense", "output.LayerNorm"), "vit": ("mlp.fc2", ""), "deit": ("mlp.fc2", ""),
    "swin": ("mlp.fc2", ""), "t5": ("layer.1.DenseReluDense.wo", ""), "opt": ("fc2", ""), "qwen": ("mlp.down_proj", ""),
    "phi": ("mlp.fc2", ""), "clip": ("mlp.fc2", ""), "timm resnet": ("conv2", "act2"), "timm convnext": ("mlp.fc2", ""),
    "resnet": ("layer.1.convolution", "activation"), "resnet of functions": ("conv2", "relu"),
    "masked": ("output.dense", "output.LayerNorm"),
}  # fmt: skip
"""Family -> last projection of a block, and what follows its stream."""


@pytest.mark.parametrize("family", JOINTS)
def test_joints_are_found(family: str) -> None:
    net = built(family)
    inputs = net.preprocess(data_of(net, 2)) if net.processor is not None else {**net.example}
    for stack in stacks(net):
        for block in stack.blocks:
            joint = joint_of(net, block, inputs)
            assert joint is not None, block
            projection, tail = JOINTS[family]
            ends = {"": None, "relu": "relu"}.get(tail, f"{block}.{tail}")
            assert (joint.projection, joint.tail) == (f"{block}.{projection}", ends)


@pytest.mark.parametrize("family", ["gemma2"])
def test_a_norm_behind_the_projection_is_no_joint(family: str) -> None:
    net = built(family)
    assert not any(joint_of(net, block, net.preprocess(texts(2))) for block in stacks(net)[0].blocks)
    with pytest.raises(ValueError, match=r"the blocks of Gemma2ForCausalLM do not add .*source_layer='model.layers.0'"):
        shorten(net, texts(60), remove=1, **QUIET)
    assert shorten(net, texts(60), remove=1, matcher="drop", **QUIET).model is not None


ALIKE = {"swin": "windows alternate", "roberta": "bert", "masked": "bert", "qwen": "llama"}
"""Family -> why it is left out: another family with the same blocks."""


@pytest.mark.parametrize(
    ("family", "matcher"),
    [*((family, "refit") for family in JOINTS if family not in ALIKE), ("llama", "drop"), ("timm resnet", "drop")],
)
def test_the_plain_network_computes_what_the_mapped_one_does(
    family: str, matcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_stitch_shorten.search.REFITS", ())  # no network is trained here, and a refit seldom helps
    net = built(family)
    found = shorten(net, data_of(net), remove=1, matcher=matcher, test_data=data_of(net, 100), **QUIET)
    assert found.error <= 2e-6 and found.model is not None
    count = sum(len(stack.blocks) for stack in stacks(net))
    assert sum(len(stack.blocks) for stack in stacks(found.model)) in (count - 1, count - 2)  # one block is no stack
    assert type(found.model.model) is type(net.model)
    assert found.size["shortened"].parameters < found.size["full"].parameters


def test_channels_with_a_small_factor_do_not_choose_the_penalty() -> None:
    torch.manual_seed(0)
    rows, scale = torch.randn(1000, 6, dtype=torch.float64), torch.tensor([1.0, 1e-3], dtype=torch.float64)
    lacks = torch.stack((rows @ torch.ones(6, dtype=torch.float64), torch.randn(1000, dtype=torch.float64) / 1e-3), 1)
    fitted, held = Moments(), Moments()
    fitted.add(rows[:800], {"b": lacks[:800]})
    held.add(rows[800:], {"b": lacks[800:]})
    found = Fits(nn.Linear(6, 2), scale, fitted, held).refit("b")
    assert torch.allclose(found.weight[0], torch.ones(6, dtype=torch.float64), atol=1e-2)


def test_scores_do_not_depend_on_batches_beside_padding_on_the_left() -> None:
    config = transformers.GPT2Config(n_embd=24, n_layer=4, n_head=4, vocab_size=80, **ENDS)
    tokenizer = plain_tokenizer()
    tokenizer.padding_side = "left"
    net = hf_stitch.load(transformers.GPT2LMHeadModel(config).eval(), processor=tokenizer)
    found = [shorten(net, texts(64), remove=1, batch_size=size, **QUIET) for size in (1, 64)]
    assert found[0].removed == found[1].removed
    scores = [each.scores["shortened"]["perplexity"].value for each in found]
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)


def test_moments_that_do_not_fit_are_refused_before_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_stitch.resources.free_memory", lambda device: 1000)
    net = built("llama")
    with pytest.raises(
        ValueError, match=r"the moments of all blocks take .* but 1 kB are free: exclude blocks with keep"
    ):
        shorten(net, data_of(net), remove=1, **QUIET)


def test_a_refit_that_does_not_help_is_left_out() -> None:
    net = built("llama")
    samples = Samples.of(data_of(net))
    with Run.of(shorten, {"progress": False}, takes=WITHOUT_STATE) as run:
        search = Search(net, net, (), "refit", run)
        search.find_joints(samples)
        good = search.changes(samples, search.intervals(1))
        first, *others = good
        bad = replace(good[first], weight=good[first].weight + 100.0)
        wanted = search.values(samples, {first: None})[first]
        values, kept, figure = search.scored(samples, {**good, first: bad}, None)
        assert kept[first] is None and values[first] == wanted and figure == "kl_divergence"
        alone = search.values(samples, good)
        for each in others:
            dropped = search.values(samples, {each: None})[each]
            assert (kept[each] is None) == (dropped[figure] < alone[each][figure])
        as_published = Search(net, net, (), "replaceme", run)
        as_published.find_joints(samples)
        assert as_published.scored(samples, {first: bad}, None)[1][first] is bad


def test_channels_without_a_factor_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_stitch_shorten.search.REFITS", ())
    net = built("timm convnext")
    block: Any = net.model.get_submodule("stages.1.blocks.0")
    block.gamma.data[3] = 0
    found = shorten(net, images(60), remove=1, keep=["stages.1.blocks.2"], **QUIET)
    assert found.error < 2e-6 and found.model is not None
    weights = [each.model.get_submodule("stages.1.blocks.0.mlp.fc2").weight for each in (net, found.model)]
    assert torch.equal(weights[0][3], weights[1][3]) and not torch.equal(weights[0][2], weights[1][2])


def test_blocks_of_several_stages_are_removed() -> None:
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", layers=(1, 3, 3, 1), channels=(8, 8, 16, 16), num_classes=CLASSES)
    for name, value in model.named_parameters():
        value.data.uniform_(0.5, 1) if name.endswith("bn2.weight") else None  # 0 at first
    net = hf_stitch.load(model.eval(), example_inputs=torch.randn(2, 3, SIZE, SIZE))
    for matcher in ("refit", "drop"):
        found = shorten(net, images(60), remove=4, matcher=matcher, **QUIET)
        assert {name.partition(".")[0] for name in found.removed} == {"layer2", "layer3"} and found.error < 2e-6


def test_labels_are_numbered_as_the_classes_of_the_network() -> None:
    import datasets

    torch.manual_seed(0)
    config = transformers.BertConfig(**DEEP, num_labels=3, id2label={0: "a", 1: "b", 2: "c"})
    model: Any = transformers.BertForSequenceClassification(config).eval()
    for value in model.parameters():
        value.data *= 3 if value.dim() > 1 else 1
    net = hf_stitch.load(model, processor=plain_tokenizer())
    own = net.forward(net.preprocess(texts(80))).logits.argmax(-1).tolist()
    rows = {"text": texts(80), "label": [2 - each for each in own]}
    data = datasets.Dataset.from_dict(rows).cast_column("label", datasets.ClassLabel(names=["c", "b", "a"]))
    found = shorten(net, data, remove=1, **QUIET)
    assert found.scores["full"]["accuracy"].value == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_keep_their_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    deep().model.save_pretrained(tmp_path)  # type: ignore[operator]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    net = hf_stitch.load(model, processor=plain_tokenizer())
    found = shorten(net, texts(60), remove=1, **QUIET)
    assert found.model is not None
    buffers = [dict(each.model.named_buffers()) for each in (net, found.model)]
    assert buffers[0].keys() == buffers[1].keys() and buffers[0]
    assert all(torch.equal(value, buffers[1][name]) for name, value in buffers[0].items())
    assert {value.dtype for value in found.model.model.parameters()} == {dtype}


def test_windows_that_alternate_are_refused() -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", num_classes=CLASSES, img_size=SIZE, window_size=4, embed_dim=24, depths=(4,),
        num_heads=(2,),
    )  # fmt: skip
    net = hf_stitch.load(model.eval(), example_inputs=torch.randn(2, 3, SIZE, SIZE))
    keep = ["layers.0.blocks.3"]  # without the last block, the others stay in their places
    with pytest.raises(CannotBeRebuiltError, match="blocks depend on their position"):
        shorten(net, images(60), remove=1, keep=keep, **QUIET)
    assert shorten(net, images(60), remove=2, scattered=False, **QUIET).error < 2e-6


def changed(net: Adapter, kind: str) -> str:
    """Change by hand what no file of weights holds, and return its name."""
    layers: Any = net.model.get_submodule("model.layers" if kind != "positions" else "bert.encoder.layer")
    match kind:
        case "a rotary buffer":
            net.model.get_submodule("model.rotary_emb").inv_freq.mul_(0.1)  # type: ignore[operator, union-attr]
            return "model.rotary_emb.inv_freq"
        case "positions":
            embeddings: Any = net.model.get_submodule("bert.embeddings")
            embeddings.position_ids = embeddings.position_ids.flip(1)
            return "bert.embeddings.position_ids"
        case "an attribute":
            layers[4].self_attn.scaling *= 3
            return "model.layers.4.self_attn.scaling"
        case "a forward":
            own = layers[4].mlp.forward
            layers[4].mlp.forward = lambda x: 3 * own(x)
            return "model.layers.4.mlp.forward"
        case "a hook":
            layers[4].mlp.register_forward_hook(lambda module, args, output: 3 * output)
            return "model.layers.4.mlp.hooks"
    raise ValueError(kind)


@pytest.mark.parametrize("kind", ["a rotary buffer", "positions", "an attribute", "a forward", "a hook"])
def test_what_no_file_holds_is_named_if_it_differs(kind: str) -> None:
    net = deep("bert" if kind == "positions" else "llama")
    name = changed(net, kind)
    with pytest.raises(CannotBeRebuiltError, match=rf"\): {re.escape(name)} differs from the config") as told:
        shorten(net, texts(60), remove=1, matcher="drop", keep=["model.layers.4"] * (kind != "positions"), **QUIET)
    assert "depend on their position" not in str(told.value)


# -- the search --------------------------------------------------------------------------------------------------------
@torch.no_grad()
def idle(net: Adapter, place: int) -> None:
    """Let a block of Llama add nothing to its stream."""
    block: Any = net.model.get_submodule(f"model.layers.{place}")
    block.self_attn.o_proj.weight.zero_()
    block.mlp.down_proj.weight.zero_()


@pytest.mark.parametrize("matcher", ["refit", "replaceme", "drop"])
def test_idle_blocks_are_removed_without_loss(matcher: Any) -> None:
    net = deep()
    idle(net, 1)
    idle(net, 4)
    found = shorten(net, texts(80), remove=2, matcher=matcher, **QUIET)
    assert found.removed == ("model.layers.1", "model.layers.4")
    assert found.agreement[1].value == 1 and found.scores["shortened"]["kl_divergence"].value < 1e-9
    together = shorten(net, texts(60), remove=2, matcher=matcher, scattered=False, **QUIET)
    places = [int(name.rpartition(".")[2]) for name in together.removed]
    assert places[1] == places[0] + 1 and {*places} & {1, 4}


def test_what_the_projection_can_make_up_for_is_made_up_for() -> None:
    """Blocks 3 and 4 add a linear function of what the projection of block 2 reads, which the refit finds."""
    net = deep()
    for place in (3, 4):
        idle(net, place)
    block: Any = net.model.get_submodule("model.layers.2")
    other: Any = net.model.get_submodule("model.layers.3")
    extra = torch.randn(32, 48, generator=torch.Generator().manual_seed(0)) * 0.5
    seen: list[torch.Tensor] = []
    block.mlp.down_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))

    class More(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return seen[-1] @ extra.T

    other.mlp = More()
    inputs = net.preprocess(texts(40))
    taps = run(net, inputs, {}, ["model.layers.2", "model.layers.3"])
    change = (taps.outputs["model.layers.3"].values - taps.outputs["model.layers.2"].values).flatten(0, 1)
    read = seen[-1].flatten(0, 1)
    moments = Moments(), Moments()
    moments[0].add(read[:200], {"b": change[:200]})
    moments[1].add(read[200:], {"b": change[200:]})
    found = Fits(block.mlp.down_proj, torch.ones(32), *moments).refit("b")
    assert (found.weight - extra.double()).norm() < 0.05 * extra.norm()


@pytest.mark.parametrize("family", ["llama", "timm convnext"])
def test_changes_are_fitted_to_real_rows_over_their_factor(family: str) -> None:
    net = built(family)
    data = data_of(net, 24)
    with Run.of(shorten, {"progress": False, "batch_size": 24}, takes=WITHOUT_STATE) as run_:
        search = Search(net, net, (), "replaceme", run_)
        search.find_joints(Samples.of(data))
        interval = search.intervals(1)[0]
        found = search.changes(Samples.of(data), [interval])[interval]
    before, end = interval.before, interval.end
    joint, moments = search.joints[before], Moments()
    projection = net.model.get_submodule(joint.projection)
    for sample in data:  # alone, without padding
        with torch.no_grad():
            taps = run(
                net, net.preprocess([sample]), {each: search.joints[each] for each in (before, end)}, [before, end]
            )
        lack = rows_of(taps.streams[end] - taps.streams[before], taps.outputs[before].layout) / joint.scale
        moments.add(input_rows(projection, taps.inputs[before]), {end: lack})
    wanted = Fits(projection, joint.scale, moments, Moments()).replaceme(end)
    assert wanted.weight.norm() > 0.01
    assert torch.allclose(found.weight, wanted.weight, atol=1e-4, rtol=1e-3)


class Added(nn.Module):
    """A block that adds something to what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.wide(x).tanh())


def test_blocks_behind_other_modules_in_their_list_are_removed() -> None:
    torch.manual_seed(0)
    body = [nn.Linear(4, 6), nn.Linear(6, 8), *(Added() for _ in range(3))]
    head, data = nn.Linear(8, CLASSES), torch.randn(160, 4)
    net = hf_stitch.load(nn.Sequential(nn.Sequential(*body), head).eval(), example_inputs=data[:2])
    (stack,) = stacks(net)
    assert (stack.blocks, stack.offset) == (("0.2", "0.3", "0.4"), 2)
    found = shorten(net, data[:60], remove=1, keep=["0.4"], matcher="drop", test_data=data[60:], **QUIET)
    assert found.removed == ("0.3",) and found.model is not None
    assert torch.equal(found.model.forward(data), nn.Sequential(*body[:3], body[4], head)(data))


def test_scattered_names_are_those_of_the_original() -> None:
    net = deep("bert")
    found = shorten(net, texts(80), remove=3, **QUIET)
    kept = [each for each in range(6) if f"bert.encoder.layer.{each}" not in found.removed]
    assert len(found.removed) == 3 and len(kept) == 3 and found.model is not None
    own, short = net.model.state_dict(), found.model.model.state_dict()
    for new, old in enumerate(kept):  # all but the refitted projections and the copied norms
        name = "attention.self.query.weight"
        assert torch.equal(short[f"bert.encoder.layer.{new}.{name}"], own[f"bert.encoder.layer.{old}.{name}"])
    assert {name for each in found.candidates if each.chosen for name in each.blocks} <= {*found.removed}
    assert {len(each.blocks) for each in found.candidates} == {1, 2, 3}


def test_blocks_can_be_kept_and_the_bound_is_met() -> None:
    net = deep()
    idle(net, 2)
    keep = ["model.layers.2"]
    found = shorten(net, texts(80), remove=1, keep=keep, **QUIET)
    assert found.accepted is None and found.removed != ("model.layers.2",)
    assert all(keep[0] not in each.blocks for each in found.candidates)
    found = shorten(net, texts(80), remove="auto", max_loss=0.0, **QUIET)
    assert found.removed == ("model.layers.2",) and found.bound == 1
    strict = shorten(net, texts(80), remove=0.34, max_loss=0.0, **QUIET)
    assert len(strict.removed) == 2 and strict.accepted is False and "agreement may be below 1" in strict.verdict
    loose = shorten(deep(), texts(80), remove="auto", max_loss=1.0, matcher="drop", **QUIET)
    assert loose.accepted
    with pytest.raises(ValueError, match=r"agreement with the whole network is at most .* max_loss requires"):
        shorten(deep(), texts(80), remove="auto", max_loss=0.0, **QUIET)


def test_later_blocks_catch_up() -> None:
    net, options = deep(), {"remove": 2, "keep": ["model.layers.5"], "scattered": False, **QUIET}
    refit, later = (shorten(net, texts(200), matcher=each, **options) for each in ("refit", "refit_later"))
    assert later.removed == refit.removed == ("model.layers.2", "model.layers.3") and later.model is not None
    one, two = (each.scores["shortened"]["kl_divergence"].value for each in (refit, later))
    assert two < one
    block: Any = later.model.model.get_submodule("model.layers.3.mlp.down_proj")
    assert not torch.equal(block.weight, net.model.get_submodule("model.layers.5.mlp.down_proj").weight)


def test_masked_tokens_and_vectors_are_scored() -> None:
    found = shorten(built("masked"), texts(80), remove=1, **QUIET)
    assert found.task == "fill-mask" and found.figure == "kl_divergence"
    clip = built("clip")
    with pytest.raises(ValueError, match="20 samples to test on are too few, at least 100 are required"):
        shorten(clip, images(80), remove=1, **QUIET)  # by chance, half of ten neighbours among twenty are common
    found = shorten(clip, images(80), remove=1, test_data=images(180)[80:], **QUIET)
    assert found.n == 100
    assert found.figure == "r2" and found.agreement[0] == "knn_overlap" and "recompute all stored" in found.notes[-1]


def test_a_figure_can_be_chosen() -> None:
    net = deep()
    found = shorten(net, texts(80), remove=1, metric="agreement", **QUIET)
    assert found.figure == "agreement" and found.gain is not None
    with pytest.raises(ValueError, match=r"metric must be one of perplexity, .*, got 'bleu'"):
        shorten(net, texts(80), remove=1, metric="bleu", **QUIET)


def test_the_network_itself_stays_as_it_is() -> None:
    net = deep()
    before = {name: value.clone() for name, value in net.model.state_dict().items()}
    shorten(net, texts(60), remove=2, **QUIET)
    assert all(torch.equal(value, before[name]) for name, value in net.model.state_dict().items())


# -- folders -----------------------------------------------------------------------------------------------------------
ALONE = """
import sys, torch, transformers
ids = torch.arange(4, 16).reshape(2, 6)
model = transformers.{kind}.from_pretrained(sys.argv[1]).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
assert not any(name.startswith("hf_stitch") for name in sys.modules)
output = model(ids)
options = dict(max_new_tokens=9, min_new_tokens=9, do_sample=False)
made = [model.generate(ids[:1], use_cache=cache, **options) for cache in (True, False) if model.can_generate()]
torch.save((output.logits, *made), sys.argv[2])
"""


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "AutoModelForCausalLM") for family in ("llama", "opt")),
        ("bert", "AutoModelForSequenceClassification"),
    ],
)
def test_a_folder_needs_no_hf_stitch(family: str, kind: str, tmp_path: Path) -> None:
    net = built(family)
    found = shorten(net, texts(60), remove=1, **QUIET)
    found.save_pretrained(tmp_path / "short")
    subprocess.run([sys.executable, "-c", ALONE.format(kind=kind), tmp_path / "short", tmp_path / "found"], check=True)
    logits, *generated = torch.load(tmp_path / "found")
    assert found.model is not None
    with torch.no_grad():
        assert torch.equal(logits, found.model.model(torch.arange(4, 16).reshape(2, 6)).logits)
    if generated:
        assert torch.equal(generated[0], generated[1]) and generated[0].shape == (1, 15)
    card = (tmp_path / "short" / "README.md").read_text()
    assert found.verdict in card and 'library_name: "transformers"' in card


def test_a_save_leaves_the_old_folder_or_the_new_one_whole(tmp_path: Path) -> None:
    net = deep()
    one, two = (shorten(net, texts(60), remove=count, **QUIET) for count in (1, 2))
    assert one.model is not None and two.model is not None
    one.save_pretrained(tmp_path)
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_text("{}")  # as of an earlier save in parts

    def depth() -> int:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        return len(loaded.model.layers)

    def broken(folder: Any) -> None:
        (Path(folder) / "config.json").write_text("{")
        raise OSError("no space left on device")

    saves, two.model.model.save_pretrained = two.model.model.save_pretrained, broken
    with pytest.raises(OSError, match="no space left"):
        two.save_pretrained(tmp_path)
    assert depth() == 5
    two.model.model.save_pretrained = saves
    two.save_pretrained(tmp_path)
    assert depth() == 4 and [each.name for each in tmp_path.glob("*model*")] == ["model.safetensors"]


KILLED = """
import os, signal, sys
import transformers
from pathlib import Path
from hf_stitch_shorten.folder import save_network
import hf_stitch

model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
net = hf_stitch.load(model, processor=transformers.AutoTokenizer.from_pretrained(sys.argv[1]))
own = model.save_pretrained
model.save_pretrained = lambda folder: (own(folder), os.kill(os.getpid(), signal.SIGKILL))
save_network(net, Path(sys.argv[2]), "card")
"""


def test_a_killed_save_leaves_the_old_folder_whole(tmp_path: Path) -> None:
    one, two = (shorten(deep(), texts(60), remove=count, **QUIET) for count in (1, 2))
    one.save_pretrained(tmp_path / "short")
    two.save_pretrained(tmp_path / "other")
    before = {path.name: path.read_bytes() for path in (tmp_path / "short").iterdir() if path.is_file()}
    ran = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "other", tmp_path / "short"], check=False)
    assert ran.returncode == -9
    assert {name: (tmp_path / "short" / name).read_bytes() for name in before} == before
    two.save_pretrained(tmp_path / "short")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "short").num_hidden_layers == 4


def test_a_folder_of_timm(tmp_path: Path) -> None:
    found = shorten(built("timm resnet"), images(60), remove=1, **QUIET)
    found.save_pretrained(tmp_path / "short")
    again = timm.create_model(f"local-dir:{tmp_path / 'short'}", pretrained=True).eval()
    batch = torch.stack(images(2))
    assert found.model is not None
    with torch.no_grad():
        assert torch.equal(again(batch), found.model.model(batch))


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make a sentence encoder of some blocks."""
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.base.modules import Transformer

    def body(seed: int = 0) -> Any:
        torch.manual_seed(seed)
        place = tmp_path_factory.mktemp("bert")
        transformers.BertModel(transformers.BertConfig(**DEEP)).save_pretrained(place)
        plain_tokenizer().save_pretrained(place)
        return Transformer(str(place))

    def made(modules: Any) -> Any:
        prompts = {"prompts": {"query": "w1 w2 ", "document": "w3 "}, "default_prompt_name": "query"}
        options = {"truncate_dim": 24, "similarity_fn_name": "dot", **prompts}
        return library.SentenceTransformer(modules=modules(body), device="cpu", **options)

    return made


def pooled(body: Any) -> Any:
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling

    modules = ("body", body()), ("pooling", Pooling(32, "mean", include_prompt=False)), ("dense", Dense(32, 30))
    return OrderedDict([*modules, ("unit", Normalize())])


def routed(body: Any) -> Any:
    from sentence_transformers.base.modules import Normalize, Router
    from sentence_transformers.sentence_transformer.modules import Pooling

    query, document = ([body(seed), Pooling(32, "mean")] for seed in range(2))
    return [Router.for_query_document(query, document), Normalize()]


@pytest.mark.parametrize("modules", [pooled, routed])
def test_a_sentence_encoder_is_saved_as_one(modules: Any, sentences: Any, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    encoder = sentences(modules)
    encoder.save(str(tmp_path / "whole"))
    found = shorten(str(tmp_path / "whole"), texts(40), remove=1, test_data=texts(100, 4), **QUIET)
    found.save_pretrained(tmp_path / "short")
    again = library.SentenceTransformer(str(tmp_path / "short"), device="cpu")
    assert (again.prompts, again.default_prompt_name) == (encoder.prompts, "query")
    assert (again.similarity_fn_name, again.truncate_dim) == ("dot", 24)
    assert [name for name, _ in again.named_children()] == [name for name, _ in encoder.named_children()]
    route = getattr(again[0], "sub_modules", {"document": again})["document"]
    assert route[0].auto_model.config.num_hidden_layers == 5
    assert found.model is not None
    batch = texts(20, 5)
    with torch.no_grad():
        short = found.model.forward(found.model.preprocess(batch))
        reloaded = hf_stitch.load(tmp_path / "short")
        assert torch.equal(reloaded.forward(reloaded.preprocess(batch)), short)
    in_order = sorted(batch, key=len, reverse=True)  # as encode divides them
    expected = found.model.forward(found.model.preprocess(in_order)).detach()
    assert torch.equal(again.encode(in_order, convert_to_tensor=True, batch_size=20), expected)
    whole = encoder.encode(batch, convert_to_tensor=True)
    assert 0.5 < float(torch.cosine_similarity(whole, short).mean()) < 1
    with pytest.raises(ValueError, match="must be saved to an empty folder"):
        found.save_pretrained(tmp_path / "short")


def test_a_result_without_a_network_and_modules_of_your_own_save_no_folder(tmp_path: Path) -> None:
    found = shorten(built("resnet of functions"), images(60), remove=1, **QUIET)
    with pytest.raises(ValueError, match="is a custom module without save_pretrained"):
        found.save_pretrained(tmp_path / "short")
    found.save(tmp_path / "found.json")
    again = Shortened.load(tmp_path / "found.json")
    assert again == found and str(again) == str(found)
    with pytest.raises(ValueError, match="loaded from a file, which does not contain the network"):
        again.save_pretrained(tmp_path / "short")
    assert not (tmp_path / "short").exists()
    assert json.loads((tmp_path / "found.json").read_text())["verdict"] == found.verdict
    found.to_html(tmp_path / "page.html")
    assert "How good is" in (tmp_path / "page.html").read_text()
    assert len(found.to_pandas()) == len(found.candidates) and found.plot() is not None


# -- refusals ----------------------------------------------------------------------------------------------------------
def test_shared_blocks_are_no_stack() -> None:
    with pytest.raises(ValueError, match="AlbertForSequenceClassification does not contain a stack of blocks"):
        shorten(built("albert"), texts(60), remove=1, **QUIET)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remove": 6}, r"remove=6 are 6 of 6 blocks \(6 in model.layers\): 1 to 5 can be removed"),
        (
            {"remove": 2, "keep": ["model.layers.2", "model.layers.4"], "scattered": False},
            "2 consecutive blocks cannot be removed",
        ),
        ({"remove": 0}, "1 to 5 can be removed"),
        ({"remove": 0.99}, "1 to 5 can be removed"),
        ({"remove": "auto"}, "remove='auto' requires max_loss"),
        ({"keep": ["layer"]}, "keep contains 'layer', which is not a block; blocks: model.layers.0, "),
        ({"keep": [f"model.layers.{i}" for i in range(6)]}, "1 blocks are to be removed, but keep leaves only 0"),
        ({"matcher": "lstsq"}, "matcher"),
        (
            {"remove": 3, "keep": ["model.layers.1", "model.layers.2", "model.layers.4"]},
            "3 blocks .*, but keep leaves only 2",
        ),
        ({"test_data": ["w1"]}, "1 samples to test on are too few, at least 8"),
    ],
)
def test_options_are_checked(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shorten(deep(), texts(60), **{"remove": 1, **options}, **QUIET)


@pytest.mark.parametrize(
    ("form", "way"),
    [
        ("peft", "merge_and_unload"), ("int8", "quantized"), ("pruned", "prune.remove"),
        ("weight norm", "remove_parametrizations"), ("old weight norm", "remove_weight_norm"),
        ("offloaded", "without device_map"),
    ],
)  # fmt: skip
def test_forms_are_refused_with_the_way(form: str, way: str) -> None:
    assert form not in REFUSED
    with pytest.raises(ValueError, match=way):
        shorten(adapter_of("bert", form_of("bert", form)), texts(60), remove=1, **QUIET)


@pytest.mark.parametrize("form", ["compiled", "bf16", "peft-merged"])
def test_forms_are_shortened(form: str) -> None:
    found = shorten(adapter_of("llama", form_of("llama", form)), texts(80), remove=1, **QUIET)
    assert found.model is not None and found.error < (3e-2 if form == "bf16" else 2e-6)


# -- command line ------------------------------------------------------------------------------------------------------
def test_the_command_saves_a_folder_and_ends_with_the_verdict(tmp_path: Path) -> None:
    import datasets

    net = deep()
    net.model.save_pretrained(tmp_path / "net")  # type: ignore[operator]
    plain_tokenizer().save_pretrained(tmp_path / "net")
    datasets.Dataset.from_dict({"text": texts(90)}).to_parquet(tmp_path / "data" / "train.parquet")
    place = ["shorten", str(tmp_path / "net"), "--data", str(tmp_path / "data"), "--remove", "1"]
    out = str(tmp_path / "out")
    result = CliRunner().invoke(app, [*place, "--out", out, "--report", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    again = transformers.AutoModelForCausalLM.from_pretrained(f"{out}/model")
    assert again.config.num_hidden_layers == 5 and (tmp_path / "page.html").exists()
    assert Shortened.load(f"{out}/shortened.json").removed
    assert CliRunner().invoke(app, [*place, "--max-loss", "0.0"]).exit_code == 1
    assert CliRunner().invoke(app, [*place[:-1], "many"]).exit_code == 2
