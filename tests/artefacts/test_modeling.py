"""Silent errors of models made of models; more are in test_saving, test_generation and test_pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.utils import parametrize

import hf_stitch
import hf_stitch.auto
from hf_stitch import StitchedModel
from hf_stitch.artefacts.heads import class_for
from hf_stitch.registry import registries

from tiny_networks import BODY, CLASSES, LAYERS, SIZE, adapted, build  # isort: skip


def stitched(a: Any, b: Any, data: Any, layers: tuple[str, str], **options: Any) -> Any:
    return hf_stitch.stitch(
        a, b, data, source_layer=layers[0], target_layer=layers[1], progress=False, **{"matcher": "ridge", **options}
    )


@pytest.mark.parametrize("pair", [("cnn", "vit"), ("vit", "cnn"), ("cnn", "cnn")], ids="-".join)
def test_weights_of_loaded_halves_are_not_initialised_again(
    pair: tuple[str, str], net: Any, images: Any, tmp_path: Path
) -> None:
    """``post_init`` would initialise modules of timm again."""
    a, b = net(pair[0]), net(pair[1], 1)
    model = stitched(a, b, images, (LAYERS[pair[0]], LAYERS[pair[1]]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    for twin in (model, StitchedModel.from_pretrained(tmp_path)):
        twin.init_weights()
        assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    parents = (a.model.state_dict(), b.model.state_dict())
    for half, parent in zip((model.source.model, model.target.model), parents, strict=True):
        kept = {name: value for name, value in half.state_dict().items() if name in parent}
        assert kept
        assert all(torch.equal(value, parent[name]) for name, value in kept.items())


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
    for kind in map(class_for, (None, *registries.heads)):
        assert not kind._keys_to_ignore_on_load_missing
        assert not kind._tied_weights_keys
    assert {f"stitch.{name}_mean" for name in model.stitch.parts} <= model.state_dict().keys()
    names = {name for name, _ in model.named_buffers()} | {name for name, _ in model.named_parameters()}
    assert names == model.state_dict().keys()  # all buffers are saved


def test_a_device_map_with_one_device(net: Any, images: Any, tmp_path: Path) -> None:
    stitched(net("cnn"), net("vit", 1), images, (LAYERS["cnn"], LAYERS["vit"])).save_pretrained(tmp_path)
    for device in ("cpu", {"": "cpu"}, torch.device("cpu")):
        assert StitchedModel.from_pretrained(tmp_path, device_map=device).device.type == "cpu"


def test_a_cast_keeps_buffers_that_a_network_computes_itself(net: Any, texts: Any, tmp_path: Path) -> None:
    """In bfloat16, rotary embeddings are wrong by radians after a few thousand tokens."""
    stitched(net("llama"), net("llama", 1), texts, (LAYERS["llama"],) * 2).save_pretrained(tmp_path)
    whole, cast = (StitchedModel.from_pretrained(tmp_path, dtype=dtype) for dtype in ("auto", "bfloat16"))
    for name, buffer in cast.named_buffers():
        expected = torch.float32 if "inv_freq" in name else torch.bfloat16
        assert buffer.dtype == expected, name
        assert "inv_freq" not in name or torch.equal(buffer, whole.get_buffer(name))
    assert {parameter.dtype for parameter in cast.parameters()} == {torch.bfloat16}
    assert any("inv_freq" in name for name, _ in cast.named_buffers())


def test_a_cast_keeps_modules_that_a_network_keeps_in_float32(net: Any, texts: Any, tmp_path: Path) -> None:
    """Otherwise T5 overflows in float16."""
    stitched(net("t5"), net("t5", 1), texts, (LAYERS["t5"],) * 2, task=None).save_pretrained(tmp_path)
    for name, parameter in StitchedModel.from_pretrained(tmp_path, dtype=torch.float16).named_parameters():
        assert parameter.dtype == (torch.float32 if ".wo." in name else torch.float16), name


def test_a_cast_without_a_plan_of_dtypes_is_refused(
    net: Any, texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stitched(net("t5"), net("t5", 1), texts, (LAYERS["t5"],) * 2, task=None).save_pretrained(tmp_path)
    monkeypatch.delattr(transformers.PreTrainedModel, "_get_dtype_plan")  # as if a version called it differently
    with pytest.raises(AttributeError, match="_get_dtype_plan"):
        StitchedModel.from_pretrained(tmp_path, dtype=torch.float16)


def test_a_cast_includes_the_statistics_of_batchnorm(net: Any, images: Any, tmp_path: Path) -> None:
    stitched(net("cnn"), net("cnn", 1), images, (LAYERS["cnn"],) * 2).save_pretrained(tmp_path)
    cast = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {v.dtype for v in cast.state_dict().values() if v.is_floating_point()} == {torch.bfloat16}
    assert cast(pixel_values=torch.zeros(2, 3, 32, 32, dtype=torch.bfloat16)).logits.dtype == torch.bfloat16


def test_a_config_can_contain_the_dtype_of_a_cast_but_a_saved_one_does_not(
    net: Any, images: Any, tmp_path: Path
) -> None:
    stitched(net("cnn"), net("cnn", 1), images, (LAYERS["cnn"],) * 2).save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cast = StitchedModel.from_pretrained(tmp_path, config=config)
    assert cast.dtype == torch.bfloat16
    assert StitchedModel.from_pretrained(tmp_path, config=config, dtype="auto").dtype == torch.float32
    cast.float().save_pretrained(tmp_path)
    assert transformers.AutoModel.from_pretrained(tmp_path).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"revison": "old"}, TypeError, "has no option 'revison'; did you mean 'revision'"),
        ({"quantization_config": {"load_in_8bit": True}}, TypeError, "has no option 'quantization_config'"),
        ({"output_loading_info": True}, TypeError, "has no option 'output_loading_info'"),
        ({"dtype": "bf16"}, ValueError, "dtype must be a floating-point dtype of torch"),
        ({"torch_dtype": torch.int8}, ValueError, "dtype must be a floating-point dtype of torch"),
    ],
)
def test_unknown_options_and_values_are_rejected(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        StitchedModel.from_pretrained(tmp_path, **options)


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_problem_types_of_the_target_are_kept(kind: str, texts: Any, tmp_path: Path) -> None:
    """Pipelines read ``problem_type``: a softmax over labels would give other scores for several true labels."""
    target = build("bert", 1)
    target.config.problem_type = kind
    a = adapted("bert", target)
    stitched(a, a, texts, (LAYERS["bert"],) * 2, matcher="identity").save_pretrained(tmp_path)
    again = StitchedModel.from_pretrained(tmp_path)
    assert again.config.problem_type == kind
    words = again.preprocess(["w1 w2", "w3 w4 w5 w6 w7"])
    labels = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    with torch.no_grad():
        torch.testing.assert_close(again(**words, labels=labels).loss, target(**words, labels=labels).loss)
    outputs = [
        transformers.pipeline("text-classification", model=model, tokenizer=a.processor, top_k=None)(["w1 w2"])[0]
        for model in (target, again)
    ]
    scores = [{each["label"]: each["score"] for each in output} for output in outputs]
    assert scores[1] == pytest.approx(scores[0], abs=1e-6)


def test_a_classifier_whose_name_goes_on_after_its_task(images: Any, tmp_path: Path) -> None:
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
        model.save_pretrained(tmp_path)
        assert torch.equal(StitchedModel.from_pretrained(tmp_path)(batch).logits, wanted)
