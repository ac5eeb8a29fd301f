"""Silent errors of models made of models; more are in test_saving, test_generation and test_pipelines."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

import hf_stitch
import hf_stitch.auto
from hf_stitch import StitchedModel
from hf_stitch.registry import registries

from records import rewrite  # isort: skip
from tiny_networks import BODY, CLASSES, LAYERS, SIZE, adapted, build, network, stitched  # isort: skip


def test_a_config_of_another_kind_is_not_read() -> None:
    """Your own network may keep its own dataclass under the name ``config``."""
    nets = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)) for _ in range(2)]
    for net in nets:
        net.config = object()
    a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
    assert stitched(a, b, torch.randn(60, 4), ("1", "1")).stitch.widths == (4, 4)


def test_weights_of_loaded_halves_are_not_initialised_again(cnn_vit: StitchedModel, saved: Path, net: Any) -> None:
    """``post_init`` would initialise modules of timm again."""
    before = {name: value.clone() for name, value in cnn_vit.state_dict().items()}
    for twin in (cnn_vit, StitchedModel.from_pretrained(saved)):
        twin.init_weights()
        assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    for half, parent in ((cnn_vit.source, net("cnn")), (cnn_vit.target, net("vit", 1))):
        whole = parent.model.state_dict()
        kept = {name: value for name, value in half.model.state_dict().items() if name in whole}
        assert kept and all(torch.equal(value, whole[name]) for name, value in kept.items())


@pytest.mark.parametrize("lacking", ["sdpa", "flash_attention_2"])
def test_an_attention_that_is_not_installed_is_named_and_can_be_replaced(
    lacking: str, net: Any, texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer versions of transformers have more of them, and packages beside it."""
    model = stitched(net("t5"), net("llama"), texts, (LAYERS["t5"], LAYERS["llama"]))
    model.save_pretrained(tmp_path)
    if lacking == "sdpa":
        monkeypatch.setattr(transformers.T5PreTrainedModel, "_supports_sdpa", False)
    for end in ("source", "target"):
        rewrite(tmp_path / "config.json", lambda record, end=end: record[end]["blueprint"].update(attention=lacking))
    version = transformers.__version__
    with pytest.raises(ValueError, match=rf"T5EncoderModel lacks {lacking!r} in transformers {version}") as error:
        StitchedModel.from_pretrained(tmp_path)
    told = str(error.value)
    assert f"saved with transformers {version}" in told and "attn_implementation='eager'" in told
    assert "damaged" not in told
    again = StitchedModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert {again.source.model.config._attn_implementation, again.target.model.config._attn_implementation} == {"eager"}
    ids = torch.tensor([[7, 12, 30, 9]])
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)
    again.save_pretrained(tmp_path / "again")
    StitchedModel.from_pretrained(tmp_path / "again")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_halves_and_networks_keep_their_attention_implementation(attention: str, texts: Any, tmp_path: Path) -> None:
    """transformers would reset the attention of a nested config object, and silently ignore the padding mask."""
    a, b = adapted("bert", build("bert", 0)), adapted("bert", build("bert", 1))
    for adapter in (a, b):
        adapter.model.set_attn_implementation(attention)
    model = stitched(a, b, texts, (LAYERS["bert"],) * 2)
    model.save_pretrained(tmp_path)
    again = StitchedModel.from_pretrained(tmp_path)
    for found in (a.model, b.model, model.source.model, model.target.model, again.source.model, again.target.model):
        assert found.config._attn_implementation == attention
    assert model.source.model.config is not a.model.config
    words = model.preprocess(["w1 w2", "w3 w4 w5 w6 w7"])
    other = words["input_ids"].masked_fill(words["attention_mask"] == 0, 9)
    with torch.no_grad():
        for found in (model, again):
            assert torch.equal(found(**{**words, "input_ids": other}).logits, found(**words).logits)


def test_weights_are_plain_and_none_can_be_missing(net: Any, images: Any) -> None:
    """Parametrised weights do not load; a list of optional weights would hide randomly initialised networks."""
    a = net("vit")
    model = stitched(a, a, images, (LAYERS["vit"],) * 2, matcher="procrustes")
    assert not any(parametrize.is_parametrized(module) for module in model.modules())
    for task in map(registries.tasks.build, registries.tasks):
        kind = task.model_for("text")
        assert not kind._keys_to_ignore_on_load_missing
        assert not kind._tied_weights_keys
    assert {f"stitch.{name}_mean" for name in model.stitch.parts} <= model.state_dict().keys()
    names = {name for name, _ in model.named_buffers()} | {name for name, _ in model.named_parameters()}
    assert names == model.state_dict().keys()  # all buffers are saved


# -- casts -------------------------------------------------------------------------------------------------------------


def test_a_cast_keeps_buffers_that_a_network_computes_itself(net: Any, texts: Any, tmp_path: Path) -> None:
    """In bfloat16, rotary embeddings are wrong by radians after a few thousand tokens. A chain has them further in."""
    layer, c = LAYERS["llama"], net("llama", 2)
    first = stitched(net("llama"), net("llama", 1), texts, (layer,) * 2)
    stitched(hf_stitch.load(first), c, texts, (f"target.{layer}", layer)).save_pretrained(tmp_path)
    whole, cast = (StitchedModel.from_pretrained(tmp_path, dtype=dtype) for dtype in ("auto", "bfloat16"))
    kept = [name for name, _ in cast.named_buffers() if "inv_freq" in name]
    assert any(name.startswith("source.model.source") for name in kept)
    for name, buffer in cast.named_buffers():
        assert buffer.dtype == (torch.float32 if name in kept else torch.bfloat16), name
        assert name not in kept or torch.equal(buffer, whole.get_buffer(name))
    assert {parameter.dtype for parameter in cast.parameters()} == {torch.bfloat16}


def test_a_cast_keeps_float32_modules(net: Any, texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise T5 overflows in float16."""
    stitched(net("t5"), net("t5", 1), texts, (LAYERS["t5"],) * 2, task=None).save_pretrained(tmp_path)
    for name, parameter in StitchedModel.from_pretrained(tmp_path, dtype=torch.float16).named_parameters():
        assert parameter.dtype == (torch.float32 if ".wo." in name else torch.float16), name
    monkeypatch.delattr(transformers.PreTrainedModel, "_get_dtype_plan")  # as if a version called it differently
    with pytest.raises(AttributeError, match="_get_dtype_plan"):
        StitchedModel.from_pretrained(tmp_path, dtype=torch.float16)


def test_a_config_can_contain_the_dtype_of_a_cast_but_a_saved_one_does_not(saved: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(saved, dtype=torch.bfloat16)
    cast = StitchedModel.from_pretrained(saved, config=config)
    assert {v.dtype for v in cast.state_dict().values() if v.is_floating_point()} == {torch.bfloat16}
    assert cast(pixel_values=torch.zeros(2, 3, 32, 32, dtype=torch.bfloat16)).logits.dtype == torch.bfloat16
    assert StitchedModel.from_pretrained(saved, config=config, dtype="auto").dtype == torch.float32
    cast.float().save_pretrained(saved)
    assert transformers.AutoModel.from_pretrained(saved).dtype == torch.float32


# -- classes and configs -----------------------------------------------------------------------------------------------


def test_a_classifier_whose_name_goes_on_after_its_task(images: Any) -> None:
    """DeiT with a teacher has the logits of two heads; their mean is scored."""
    torch.manual_seed(0)
    config = transformers.DeiTConfig(**BODY, image_size=SIZE, patch_size=8, num_labels=CLASSES)
    b = hf_stitch.load(transformers.DeiTForImageClassificationWithTeacher(config).eval())
    model = stitched(b, b, images, ("deit.layers.1",) * 2, matcher="identity")
    assert isinstance(model, hf_stitch.StitchedModelForImageClassification)
    assert model.evaluation.task == "image-classification"
    batch = torch.randn(2, 3, SIZE, SIZE)
    with torch.no_grad():
        wanted = b.forward(batch).logits
        found = model(batch, labels=torch.tensor([0, 1]))
        assert torch.equal(found.logits, wanted)
        assert torch.equal(found.loss, torch.nn.functional.cross_entropy(wanted, torch.tensor([0, 1])))


def test_a_printed_model_begins_with_a_summary(cnn_vit: StitchedModel, saved: Path) -> None:
    for each in (cnn_vit, StitchedModel.from_pretrained(saved)):
        head, _, tree = str(each).partition("\n\n")
        lines = head.split("\n")
        assert lines[0] == "stitched model for image-classification"
        assert lines[1].startswith("source  ") and lines[1].endswith(f", up to {LAYERS['cnn']}")
        assert lines[2].startswith("target  ") and lines[2].endswith(f", after {LAYERS['vit']}")
        assert lines[3] == "stitch  linear, 24 → 32; matcher ridge"
        assert lines[4].startswith("scores  Its accuracy on ") and "no map" in lines[4] and "**" not in lines[4]
        assert tree == repr(each) and tree.startswith(type(each).__name__)
    cnn_vit.evaluation, cnn_vit.config.scores = None, None
    source = cnn_vit.config.source
    cnn_vit.config.source = {**source, "cut": {**source["cut"], "layer": "x\x1b[2J<b>"}}
    lines = str(cnn_vit).partition("\n\n")[0].split("\n")
    assert lines[1].endswith("up to x u001b 2J b") and len(lines) == 4
    assert r"x\u001b[2J<b>" in repr(cnn_vit.stitcher)


def test_a_record_sets_no_argument_of_a_network_but_its_optional_parts(net: Any, images: Any) -> None:
    blueprint = stitched(net("vit"), net("vit", 1), images, (LAYERS["vit"],) * 2).config.source["blueprint"]
    with pytest.raises(ValueError, match=r"arguments of .* must be add_pooling_layer"):
        registries.adapters.get("transformers")().build({**blueprint, "arguments": {"weights": "/etc/passwd"}})


@pytest.mark.parametrize("tied", [True, False])
def test_tying_weights_keeps_those_of_a_target_whose_embeddings_are_tied(tied: bool, texts: Any) -> None:
    config = build("llama", 1).config
    config.tie_word_embeddings = tied
    a, b = adapted("t5", build("t5", 0)), adapted("llama", transformers.LlamaForCausalLM(config).eval())
    model = stitched(a, b, texts, (LAYERS["t5"], LAYERS["llama"]))
    inputs = model.preprocess(["w1 w2", "w3 w4 w5"])
    expected = model(**inputs).logits
    model.tie_weights()
    model.init_weights()
    assert torch.equal(model(**inputs).logits, expected)
    assert not any(getattr(module, "_tied_weights_keys", None) for module in model.modules())
    assert model.get_input_embeddings() is model.source.model.get_input_embeddings()
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.num_attention_heads) == (1, 2, 4)


def test_a_model_that_was_built_on_the_meta_device_gets_its_first_values(texts: Any) -> None:
    model = stitched(network("bert"), network("bert", 1), texts, (LAYERS["bert"],) * 2)
    with torch.device("meta"):
        empty = type(model)(copy.deepcopy(model.config))
    empty.to_empty(device="cpu")
    for value in (*empty.parameters(), *empty.buffers()):
        value.data.fill_(7)
    empty.init_weights()
    own = dict(model.named_buffers())
    assert all(torch.equal(value, own[name]) for name, value in empty.named_buffers() if name.endswith("ids"))
    assert not any((value == 7).any() for value in empty.parameters()) and not empty.stitch.body_mean.any()


def test_a_network_without_attention_takes_no_part_in_its_choice(images: Any) -> None:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=CLASSES)
    source = adapted("cnn", transformers.ResNetForImageClassification(config).eval())
    model = stitched(source, network("vit"), images, ("resnet.encoder.stages.0", LAYERS["vit"]))
    for attention in ("sdpa", "eager"):
        model.config._attn_implementation = attention
        again = type(model)(copy.deepcopy(model.config))
        assert again.config._attn_implementation == again.target.model.config._attn_implementation == attention


def test_hooks_see_tensors_and_may_change_them(net: Any, images: Any, inputs: Any) -> None:
    """Programs that read what modules exchange (torchinfo, FSDP, backward hooks) know nothing of representations."""
    a, b = net("cnn"), net("vit", 1)
    model, given = stitched(a, b, images, (LAYERS["cnn"], LAYERS["vit"])), inputs(a)
    seen: dict[str, list[Any]] = {name: [] for name in ("source", "stitch", "target")}
    for name, module in [*model.named_children()]:
        module.register_forward_hook(
            lambda _, args, kwargs, output, name=name: seen[name].append((args, kwargs, output)), with_kwargs=True
        )
    gradients: list[Any] = []
    model.stitch.register_full_backward_hook(lambda _, *each: gradients.append(each))
    entering = model.transfer(**given)
    expected = model.head(entering).logits
    assert isinstance(entering, hf_stitch.Representation)
    model(**given).logits.sum().backward()
    assert not any(isinstance(leaf, hf_stitch.Representation) for leaf in tree_leaves(list(seen.values())))
    assert all(len(calls) == 2 for calls in seen.values())
    assert torch.equal(seen["stitch"][0][2], entering.values)
    (((before, *_), (after,)),) = gradients
    assert before.shape == seen["source"][0][2].shape and after.shape == entering.values.shape
    assert bool(before.any()) and bool(after.any())
    shift = model.stitch.register_forward_hook(lambda _, __, values: values + 1)
    moved = model(**given).logits
    shift.remove()
    assert torch.equal(moved, model.head(entering.replace(values=entering.values + 1)).logits)
    assert not torch.equal(moved, expected)
    for module, factor in ((model.stitch, 0), (model.target, 2)):  # whose first argument is all that a hook sees
        hook = module.register_forward_pre_hook(lambda _, args, factor=factor: factor * args[0])
        assert not torch.equal(model(**given).logits, expected)
        hook.remove()
    assert torch.equal(model(**given).logits, expected)
