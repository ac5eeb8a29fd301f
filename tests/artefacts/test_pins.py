"""What pins a network: its weights, its config and its processor."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import nn

import hf_stitch
from hf_stitch import Adapter, ModelReference, Stitcher
from hf_stitch.adapters.pinning import settings_of_config

from records import rewrite  # isort: skip
from tiny_networks import BODY, CLASSES, LAYERS, SIZE, TEXT, adapted, build, plain_tokenizer, stitched, tokenizer  # isort: skip


def vit(seed: int = 0, processor: dict[str, Any] | None = None, **config: Any) -> Adapter:
    made = transformers.ViTForImageClassification(
        transformers.ViTConfig(**{**BODY, "image_size": SIZE, "patch_size": 8, "num_labels": CLASSES, **config})
    )
    made.load_state_dict(build("vit", seed).state_dict())
    size = {"height": SIZE, "width": SIZE}
    return hf_stitch.load(made, processor=transformers.ViTImageProcessor(**{"size": size, **(processor or {})}))


def bert(seed: int = 0, tokens: Any = None, **config: Any) -> Adapter:
    made = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT, num_labels=3, **config))
    made.load_state_dict(build("bert", seed).state_dict())
    return hf_stitch.load(made, processor=plain_tokenizer() if tokens is None else tokens)


def cnn(seed: int = 0, mean: float | None = None, **arguments: Any) -> Adapter:
    made = timm.create_model("resnet10t", num_classes=CLASSES, channels=(16, 24, 32, 48), **arguments)
    made.load_state_dict(build("cnn", seed).state_dict())
    made.pretrained_cfg["input_size"] = (3, SIZE, SIZE)
    if mean is not None:
        made.pretrained_cfg["mean"] = (mean,) * 3
    return hf_stitch.load(made)


def other_words() -> Any:
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return tokenizer(60, 7, *special.values(), **special)


FAMILIES: dict[str, Callable[..., Adapter]] = {"vit": vit, "bert": bert, "cnn": cnn}

CHANGES: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "activation of a ViT": ("vit", {"hidden_act": "relu"}, "config", "hidden_act 'gelu', now 'relu'"),
    "activation of a ResNet": ("cnn", {"act_layer": nn.SiLU}, "config", r"arguments\.act_layer not set, now '.*SiLU"),
    "mean of images": (
        "vit", {"processor": {"image_mean": [0.1] * 3}}, "processor",
        r"image_mean \[0\.5, 0\.5, 0\.5\], now \[0\.1, 0\.1, 0\.1\]",
    ),
    "mean of images in timm": ("cnn", {"mean": 0.1}, "processor", r"mean \[0\.485, .*\], now \[0\.1, 0\.1, 0\.1\]"),
    "vocabulary": ("bert", {"tokens": other_words()}, "processor", r"model\.vocab sha256:\w+…, now sha256:\w+…"),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(images: Any, texts: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``saved(family)``: the folder of a stitcher between two networks of a family."""

    def make(family: str) -> Path:
        data, pooling = (texts, "mean") if family == "bert" else (images, "none")
        nets, layers = (FAMILIES[family](seed) for seed in (0, 1)), (LAYERS[family],) * 2
        made = stitched(*nets, data, layers, ridge=1.0, pooling=pooling)
        made.stitcher.save_pretrained(folder := tmp_path_factory.mktemp(family))
        return folder

    return functools.cache(make)


# -- attaching -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("side", "changed"), [*(("source", each) for each in CHANGES), ("target", "activation of a ViT")]
)
def test_the_same_weights_with_other_settings_are_refused_unless_allowed(
    side: str, changed: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    family, change, part, message = CHANGES[changed]
    stitcher, other = Stitcher.from_pretrained(saved(family)), "processor" if part == "config" else "config"
    seeds = {"source": 0, "target": 1}
    nets = {end: FAMILIES[family](seed, **(change if end == side else {})) for end, seed in seeds.items()}
    assert nets[side].pinned.weights_hash == getattr(stitcher, side).weights_hash
    for allowed in ((), (other,)):
        with pytest.raises(ValueError, match=rf"the {side} .* \({part}: {message}.*allow_changed=\('{part}',\)"):
            stitcher.attach(**nets, allow_changed=allowed)
    attached = stitcher.attach(**nets, allow_changed=(part,))
    (told,) = attached.config.recipe["changed_since_fit"]
    assert told.startswith(f"{side} {part}: ")
    assert stitcher.scores and not attached.config.scores
    attached.stitcher.save_pretrained(tmp_path)
    assert "| changed since the fit | " + f"{side} {part}: " in (tmp_path / "README.md").read_text()
    again = Stitcher.from_pretrained(tmp_path)  # it pins the networks to which it was attached
    assert again.attach(**nets).config.recipe["changed_since_fit"] == [told]


def test_what_differs_is_named_and_weights_may_never_differ(saved: Callable[[str], Path]) -> None:
    attach = Stitcher.from_pretrained(saved("vit")).attach
    changed = vit(0, {"image_mean": [0.1] * 3, "do_rescale": False}, hidden_act="relu", layer_norm_eps=0.1)
    all_of_it = r"config: hidden_act .*, layer_norm_eps .*; processor: do_rescale .*image_mean"
    both: Any = ("config", "processor")
    for source, allowed, error, message in (
        (changed, ("config",), ValueError, all_of_it),
        (vit(2), both, ValueError, "has other weights than the stitch was fitted to"),
        (vit(0), ("weights",), ValueError, r"allow_changed.* must be one of 'config', 'processor', got 'weights'"),
        (vit(0), "config", TypeError, r"allow_changed must be a list, got 'config'; write \['config'\]"),
    ):
        with pytest.raises(error, match=message):
            attach(source, vit(1), allow_changed=allowed)  # type: ignore[arg-type]
    found = attach(changed, vit(1), allow_changed=both).config.recipe["changed_since_fit"]
    assert [text.split(":")[0] for text in found] == ["source config", "source processor"]


@pytest.mark.filterwarnings("error")
def test_equal_networks_attach_and_keep_their_scores(saved: Callable[[str], Path]) -> None:
    for family, build_one in FAMILIES.items():
        stitcher = Stitcher.from_pretrained(saved(family))
        attached = stitcher.attach(build_one(0), build_one(1))
        assert attached.config.scores == stitcher.scores
        assert "changed_since_fit" not in attached.config.recipe


def test_processors_are_compared_if_both_sides_have_one_unless_both_are_user_code(saved: Callable[[str], Path]) -> None:
    stitcher = Stitcher.from_pretrained(saved("vit"))
    stitcher.attach(vit(0).model, vit(1).model)  # without processors, raw images raise an error
    mine = hf_stitch.load(vit(0).model, processor=torch.as_tensor)
    with pytest.raises(ValueError, match="processor: class 'ViTImageProcessor', now 'user code'"):
        stitcher.attach(mine, vit(1))
    again = stitcher.attach(mine, vit(1), allow_changed=("processor",)).stitcher
    with pytest.raises(ValueError, match="processor: class 'user code', now 'ViTImageProcessor'"):
        again.attach(vit(0), vit(1))
    again.attach(hf_stitch.load(vit(0).model, processor=lambda image: image), vit(1))
    stitcher.source = hf_stitch.load(vit(0).model).pinned
    stitcher.attach(vit(0, {"image_mean": [0.1] * 3}), vit(1))


def test_the_limit_of_a_tokenizer_counts_up_to_the_positions_of_the_network(saved: Callable[[str], Path]) -> None:
    stitcher, positions = Stitcher.from_pretrained(saved("bert")), 512

    def limited(most: int) -> Adapter:
        tokens = plain_tokenizer()
        tokens.model_max_length = most
        return bert(0, tokens)

    for most in (positions, positions + 1, 10**6):
        stitcher.attach(limited(most), bert(1))
    with pytest.raises(ValueError, match=f"processor: max_tokens {positions}, now 5"):
        stitcher.attach(limited(5), bert(1))


def test_an_old_record_warns_once_that_only_weights_are_compared(saved: Callable[[str], Path], tmp_path: Path) -> None:
    old = shutil.copytree(saved("vit"), tmp_path / "old")
    for side, part in itertools.product(("source", "target"), ("config", "processor")):
        rewrite(old / "stitcher.json", lambda record, side=side, part=part: record[side]["reference"].pop(part))
    stitcher = Stitcher.from_pretrained(old)
    assert stitcher.source.config is None and stitcher.source.weights_hash
    changed = vit(0, {"image_mean": [0.1] * 3}, hidden_act="relu")
    with pytest.warns(UserWarning, match="by version 0.2.0 or earlier, so only the weights .* are checked") as seen:
        attached = stitcher.attach(changed, vit(1))
    assert [warning.filename for warning in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Stitcher.from_pretrained(old).attach(changed, vit(1))
    assert attached.stitcher.source.config == changed.settings()  # saved again, it pins all


def test_a_local_folder_is_passed_to_attach(images: Any, inputs: Any, net: Any, tmp_path: Path) -> None:
    build("vit", 0).save_pretrained(tmp_path / "vit")
    a = hf_stitch.load(str(tmp_path / "vit"))
    model = stitched(a, net("cnn", 1), images, (LAYERS["vit"], LAYERS["cnn"]))
    model.stitcher.save_pretrained(tmp_path / "stitcher")
    attached = Stitcher.from_pretrained(tmp_path / "stitcher").attach(str(tmp_path / "vit"), net("cnn", 1))
    with torch.no_grad():
        assert torch.equal(attached(**inputs(a)).logits, model(**inputs(a)).logits)


def test_attaching_changes_neither_the_stitcher_nor_the_networks(saved_stitcher: Path, net: Any) -> None:
    stitcher = Stitcher.from_pretrained(saved_stitcher)
    assert sum(path.stat().st_size for path in saved_stitcher.iterdir()) < 22_000
    attached = stitcher.attach(net("cnn"), net("vit", 1))
    assert attached.parents == (net("cnn"), net("vit", 1))
    with torch.no_grad():
        for parameter in attached.parameters():
            parameter.zero_()
    assert bool(stitcher.stitch.body.weight.any())
    assert all(bool(p.any()) for p in net("vit", 1).model.vit.layers[2].mlp.parameters() if p.dim() > 1)
    other: Any = build("vit", 1)
    with torch.no_grad():
        list(other.parameters())[-1][0] += 1e-3  # a single weight
    with pytest.raises(ValueError, match=r"the target .* has other weights than the stitch was fitted to"):
        stitcher.attach(net("cnn"), adapted("vit", other))


def test_an_unknown_task_is_rejected(saved_stitcher: Path, net: Any) -> None:
    rewrite(saved_stitcher / "stitcher.json", lambda c: c.update(task="image-clasification"))
    with pytest.raises(ValueError, match="no 'image-clasification' among tasks; did you mean"):
        Stitcher.from_pretrained(saved_stitcher).attach(net("cnn"), net("vit", 1))


# -- user code ----------------------------------------------------------------------------------------------------
class Sizes:
    def __init__(self) -> None:
        self.width, self.slope = 8, 1.0


class Written(nn.Module):
    """User code with values that no weight contains, some of which its forward keeps for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.shift, self.act, self.calls = Sizes(), torch.ones(1), torch.relu, 0
        self.log = logging.getLogger("written")
        self.first, self.norm, self.between, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2)
        self.register_buffer("unsaved", torch.linspace(1, 2, 8).sin(), persistent=False)
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool), persistent=False)
        self.register_buffer("turns", torch.ones(8) * 1j, persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.batch, self.kept = len(input), input
        self.norm.seen = self.calls
        values = self.between(self.norm(self.first(input)) * self.unsaved) * self.sizes.slope
        values = values.masked_fill(~self.mask, 0) * self.turns.imag
        return self.last(self.act(values + self.shift))


def written(seed: int = 0) -> Written:
    torch.manual_seed(seed)
    return Written().eval()


BY_HAND: dict[str, tuple[Callable[[Any], object], str]] = {
    "eps": (lambda net: setattr(net.norm, "eps", 0.5), r"LayerNorm\.eps 1e-05, now 0\.5"),
    "config": (lambda net: setattr(net.sizes, "slope", 3), r"Written\.sizes\.slope 1\.0, now 3"),
    "function": (lambda net: setattr(net, "act", torch.tanh), r"Written\.act 'relu', now 'tanh'"),
    "buffer": (lambda net: net.unsaved.mul_(2), r"Written\.unsaved"),
    "module": (lambda net: setattr(net, "between", nn.Tanh()), r"ReLU \['between'\], now not set.*Tanh not set, now"),
}


def example() -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def of_user_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stitcher between two networks of user code."""
    a, b = (hf_stitch.load(written(seed), example_inputs=example()) for seed in (0, 1))
    made = stitched(a, b, torch.randn(100, 4), ("norm", "norm"), task=None)
    made(input=torch.randn(30, 4))
    folder = tmp_path_factory.mktemp("written")
    made.stitcher.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("changed", BY_HAND)
def test_user_code_that_was_changed_by_hand_is_refused_by_name(changed: str, of_user_code: Path) -> None:
    change, message = BY_HAND[changed]
    stitcher = Stitcher.from_pretrained(of_user_code)
    net, b = written(), written(1)
    change(net)
    with pytest.raises(ValueError, match=rf"config: modules\.{message}"):
        stitcher.attach(net, b, example_inputs=example())
    stitcher.attach(net, b, example_inputs=example(), allow_changed=("config",))


def test_what_a_forward_of_user_code_keeps_is_no_change(of_user_code: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b = written(), written(1)
    for _ in range(3):
        a(torch.randn(17, 4))
    caplog.set_level("CRITICAL", "written")
    found = Stitcher.from_pretrained(of_user_code).attach(a, b.double().float(), example_inputs=example())
    found(input=torch.randn(9, 4))
    assert found.stitcher.source.weights_hash


def test_a_half_of_user_code_that_was_changed_has_no_stitcher() -> None:
    a, b = (hf_stitch.load(written(seed), example_inputs=example()) for seed in (0, 1))
    made = stitched(a, b, torch.randn(100, 4), ("last", "first"), task=None)
    changes = [
        *(BY_HAND[name][0] for name in ("eps", "function", "buffer")),
        lambda net: net.between.register_forward_hook(lambda _, __, output: 2 * output),
    ]
    for change in changes:
        found = copy.deepcopy(made)
        found(input=torch.randn(9, 4))
        assert found.stitcher.source.weights_hash
        change(found.source.model)
        with pytest.raises(ValueError, match=r"the source half was (changed by hand|trained or cast) since it was cut"):
            _ = found.stitcher


class Remote(transformers.BertForSequenceClassification):
    """A class as of the Hub, which no config rebuilds."""


def test_code_of_the_hub_that_was_changed_by_hand_is_refused(texts: Any) -> None:
    def remote(seed: int, eps: float = 1e-12) -> Adapter:
        net = Remote(transformers.BertConfig(**TEXT, num_labels=3)).eval()
        net.load_state_dict(build("bert", seed).state_dict())
        net.bert.encoder.layer[0].output.LayerNorm.eps = eps
        return hf_stitch.load(net, processor=plain_tokenizer())

    found = stitched(remote(0), remote(1), texts, (LAYERS["bert"],) * 2)
    found.stitcher.attach(remote(0), remote(1))
    with pytest.raises(ValueError, match=r"modules\.LayerNorm\.eps 1e-12, now "):
        found.stitcher.attach(remote(0, eps=0.5), remote(1))


def test_buffers_that_are_not_saved_are_pinned(texts: Any) -> None:
    def llama(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Adapter:
        net: Any = build("llama", seed).to(dtype)
        net.model.rotary_emb.inv_freq.mul_(scale)
        return hf_stitch.load(net, processor=plain_tokenizer())

    assert llama(0).pinned.config == llama(0, dtype=torch.bfloat16).pinned.config
    found = stitched(llama(0), llama(1), texts, (LAYERS["llama"],) * 2)
    with pytest.raises(ValueError, match=r"config: modules\.model\.rotary_emb\.inv_freq not set, now "):
        found.stitcher.attach(llama(0, scale=0.25), llama(1))


# -- routes --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["vit", "bert", "gpt2", "llama", "t5", "cnn", "convnext", "deit", "swin"])
def test_a_saved_and_loaded_network_has_the_same_pin(family: str, tmp_path: Path) -> None:
    """The tokenizer is a new one: the side of its last padding would be saved with it."""
    live = vit(0) if family == "vit" else adapted(family, build(family, 0))
    if live.library == "timm":
        timm.models.save_for_hf(live.model, tmp_path, safe_serialization=True)
    else:
        live.model.save_pretrained(tmp_path)
        live.processor.save_pretrained(tmp_path)
    loaded = hf_stitch.load(str(tmp_path), **({"task": "text-encoding"} if family == "t5" else {}))
    assert loaded.pinned.processor is not None and loaded.pinned.config.chosen
    assert live.pinned.changes(loaded.pinned) == {} == loaded.pinned.changes(live.pinned)
    record = json.loads(json.dumps(loaded.pinned.public.to_dict()))
    assert str(tmp_path) not in json.dumps(record)
    assert ModelReference.from_dict(record) == loaded.pinned.public


def test_what_no_forward_reads_is_not_pinned() -> None:
    other = vit(
        0, id2label=dict(enumerate("abcde")), hidden_dropout_prob=0.3, use_cache=False, attn_implementation="eager",
        dtype="float32", problem_type="multi_label_classification",
    )  # fmt: skip
    other.model.config.architectures, other.model.config._name_or_path = ["Other"], "/some/where"
    assert other.settings() == vit(0).settings()


def test_the_configs_inside_a_config_are_pinned() -> None:
    a, b = (
        settings_of_config(transformers.CLIPConfig(vision_config={"hidden_act": activation}))
        for activation in ("quick_gelu", "relu")
    )
    assert a.changes(b) == ["vision_config.hidden_act 'quick_gelu', now 'relu'"]
