"""Weights that a checkpoint lacks: a part is left out, or the network is refused by name; nothing is random."""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers as hf
from families import BERT, GPT2, VIT
from safetensors.torch import load_file, save_file
from tiny_networks import plain_tokenizer
from torch import Tensor
from transformers.integrations import PeftAdapterMixin

import hf_stitch
from hf_stitch.adapters.libraries.completeness import complete
from hf_stitch.reference import ModelReference

NAME = "model.safetensors"
SMALL = {**BERT, "num_hidden_layers": 2, "max_position_embeddings": 16}
IMAGES = {**VIT, "num_hidden_layers": 2}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
LLAMA = {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": False}
PIXELS = {"pixel_values": torch.randn(2, 3, 32, 32)}


def bert(kind: Any, **settings: Any) -> Any:
    return kind(hf.BertConfig(**SMALL, **settings))


BODY, CLASSIFIER = bert(hf.BertModel), bert(hf.BertForSequenceClassification)


def clip() -> Any:
    sizes = {"projection_dim": 8}
    return hf.CLIPModel(hf.CLIPConfig(text_config={**SMALL, **sizes}, vision_config={**IMAGES, **sizes}))


def change(folder: Path, lacks: Callable[[str], bool], extra: Mapping[str, Tensor] | None = None) -> None:
    """Remove weights from the files of a folder."""
    removed = 0
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        rest = {name: value for name, value in weights.items() if not lacks(name)}
        removed += len(weights) - len(rest)
        save_file({**rest, **(extra or {})}, file, metadata={"format": "pt"})
    assert removed or extra


def saved(folder: Path, model: Any, *lacking: str, extra: Mapping[str, Tensor] | None = None) -> str:
    """Save a model without the weights whose names contain one of some texts."""
    model.save_pretrained(folder)
    if lacking or extra:
        change(folder, lambda name: any(each in name for each in lacking), extra)
    return str(folder)


def loaded(folder: str, seed: int = 0, **options: Any) -> hf_stitch.Adapter:
    torch.manual_seed(seed)
    options = {"processor": plain_tokenizer(), **options}
    return hf_stitch.load(folder, **options)


def tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """All weights and buffers, also those that are not saved."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def drawn(folder: str, **options: Any) -> set[str]:
    """Names of the weights that two loads draw differently."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, two = (tensors(loaded(folder, seed, **options).model) for seed in (1, 2))
    assert one.keys() == two.keys()
    return {name for name in one if not torch.equal(one[name], two[name])}


# -- parts that are left out ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", [bert(hf.BertModel), hf.ViTModel(hf.ViTConfig(**IMAGES))], ids=["text", "image"])
def test_a_pooler_without_weights_is_left_out(model: Any, tmp_path: Path) -> None:
    folder = saved(tmp_path, model, "pooler")
    with pytest.warns(UserWarning, match=r"not contain weights of the pooler: \w+ is built without it \(add_pool"):
        adapter = loaded(folder)
    assert adapter.model.pooler is None and adapter.new == ()
    assert adapter.blueprint()["arguments"] == {"add_pooling_layer": False}
    assert not drawn(folder)
    assert loaded(folder).pinned.weights_hash == adapter.pinned.weights_hash


def test_the_body_of_a_network_with_a_head_has_no_random_pooler_and_its_head_is_not_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, bert(hf.BertForMaskedLM))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*does not contain weights of the pooler")
        assert loaded(folder, task="feature-extraction").model.pooler is None
    assert not drawn(folder, task="feature-extraction")


# -- what is refused by name ------------------------------------------------------------------------------------------
EXPERTS = hf.MixtralConfig(**LLAMA, num_local_experts=2)
LLAMA_4 = hf.Llama4TextConfig(**LLAMA, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, pad_token_id=0)
REFUSED: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "half a pooler": (BODY, "pooler.dense.bias", {}, ""),
    "a pooler that is asked for": (BODY, "pooler", {"add_pooling_layer": True}, "dense.bias, pooler.dense.weight"),
    "a weight under a new head": (BODY, "layer.1.output.dense.bias", {"task": "text-classification"}, ""),
    "a weight under a head of another size": (BODY, "layer.1.output.dense.bias", {"num_labels": 4}, ""),
    "the head of its class": (CLASSIFIER, "classifier", {}, "classifier.bias, classifier.weight"),
    "an output that is not tied": (
        hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, tie_word_embeddings=False)), "lm_head", {}, "",
    ),
    "both tied weights": (hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), "wte", {}, ""),
    "running statistics": (
        hf.ResNetForImageClassification(hf.ResNetConfig(**RESNET)), "running_mean", {"example_inputs": PIXELS}, "",
    ),
    "a part of the experts": (
        hf.MixtralForCausalLM(EXPERTS), "1.block_sparse_moe.experts.0.w1", {}, "w1|experts.gate_up_proj",
    ),
    "all of a class whose body has another name than it tells": (
        hf.Llama4TextModel(LLAMA_4), "", {"task": "text-generation"}, "lm_head.weight, model.embed_tokens",
    ),
    "another shape": (BODY, "", {"vocab_size": 120}, r"word_embeddings.weight \(shape \(100, 32\), not \(120, 32\)\)"),
}  # fmt: skip
"""What is missing -> network, weights that are not saved, options, and what the message names, if it is not these."""


@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_the_saved_class_has_are_required(case: str, tmp_path: Path) -> None:
    model, lacking, options, named = REFUSED[case]
    folder = saved(tmp_path, model, *filter(None, [lacking]))
    with pytest.raises(ValueError, match=rf"(?s){tmp_path} lacks weights of \w+.*(?:{named or lacking}).*/missing-we"):
        loaded(folder, **options)


def test_all_of_a_network_is_no_new_head(tmp_path: Path) -> None:
    """A wrapper has saved the network, so that nothing in the file has a name that is known."""
    folder = saved(tmp_path, clip())
    change(tmp_path, lambda name: True, {f"module.{name}": value for name, value in load_file(tmp_path / NAME).items()})
    with pytest.raises(ValueError, match=r"lacks weights of CLIPForImageClassification.*: classifier.bias"):
        loaded(folder, task="image-classification", example_inputs=PIXELS)


def test_weights_are_new_or_random_if_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"new weights, which .* are untrained: embeddings.word_emb"):
        adapter = loaded(saved(tmp_path, BODY), vocab_size=120, ignore_mismatched_sizes=True)
    assert adapter.new == ("embeddings.word_embeddings.weight",)
    assert loaded(saved(tmp_path, CLASSIFIER, "classifier"), pretrained=False).new == ()


@pytest.mark.parametrize("of", ["shard", "index"])
def test_a_weight_that_one_of_several_files_lacks_is_noticed(of: str, tmp_path: Path) -> None:
    BODY.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("*-of-*.safetensors")]) > 2
    if of == "shard":
        change(tmp_path, lambda name: name == "encoder.layer.1.output.dense.weight")
    else:
        index = tmp_path / f"{NAME}.index.json"
        content = json.loads(index.read_text())
        content["weight_map"] = {k: v for k, v in content["weight_map"].items() if "00002-of" not in v}
        index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"lacks weights of BertModel.*: encoder"):
        loaded(str(tmp_path))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_what_an_adapter_of_peft_or_its_base_lacks_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    for name, lacking in (("base", "layers.1.mlp.up_proj"), ("adapter", "layers.1.self_attn.q_proj.lora_A")):
        folder = tmp_path / name
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))
        model.save_pretrained(folder)
        peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)
        assert loaded(str(folder)).new == ()
        change(folder, lambda each, lacking=lacking: lacking in each)  # type: ignore[misc]
        with pytest.raises(ValueError, match=rf"lacks weights of LlamaForCausalLM.*{lacking}"):
            loaded(str(folder))


# -- what loads -------------------------------------------------------------------------------------------------------
COMPLETE = {
    "a tied output": (bert(hf.BertForMaskedLM), "predictions.decoder"),
    "a counter that eval mode does not read": (
        hf.ResNetForImageClassification(hf.ResNetConfig(**RESNET)), "num_batches_tracked",
    ),
    "what the class computes": (
        hf.BartForConditionalGeneration(hf.BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=50)),
        "final_logits_bias",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPLETE)
def test_what_has_a_value_without_the_file_is_not_required(case: str, tmp_path: Path) -> None:
    model, lacking = COMPLETE[case]
    if lacking == "predictions.decoder":
        model.save_pretrained(tmp_path)
        assert not any(name.endswith("decoder.weight") for name in load_file(tmp_path / NAME))
    else:
        saved(tmp_path, model, lacking)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter = loaded(str(tmp_path), example_inputs=PIXELS if "counter" in case else None)
    assert adapter.new == ()
    before = model.eval().state_dict()
    assert all(torch.equal(value, before[name]) for name, value in adapter.model.state_dict().items())


# -- new heads --------------------------------------------------------------------------------------------------------
HEADS: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "a classifier, and the pooler that it reads": (
        BODY, {"task": "text-classification"}, {"bert.pooler.dense", "classifier"},
    ),
    "classes by their names": (CLASSIFIER, {"id2label": {"0": "a", "1": "b", "2": "c"}}, {"classifier"}),
    "a head within the base model": (
        hf.TimmWrapperForImageClassification(
            hf.TimmWrapperConfig(
                architecture="resnet10t", num_classes=3, model_args={"channels": (8, 8, 8, 8)},
                pretrained_cfg={"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3},
            )
        ),
        {"num_labels": 5, "processor": None}, {"timm_model.fc"},
    ),
    "a part of a head": (
        hf.RobertaForSequenceClassification(hf.RobertaConfig(**SMALL)), {"num_labels": 5}, {"classifier.out_proj"},
    ),
    "a head of a network without a base": (
        clip(), {"task": "image-classification", "example_inputs": PIXELS}, {"classifier"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADS)
def test_a_head_that_is_asked_for_is_new(case: str, tmp_path: Path) -> None:
    model, options, modules = HEADS[case]
    folder = saved(tmp_path, model, *(["pooler"] if any("pooler" in each for each in modules) else []))
    with pytest.warns(UserWarning, match=r"new weights, which .* lacks and which are untrained") as caught:
        adapter = loaded(folder, **options)
    assert len([each for each in caught if "new weights" in str(each.message)]) == 1
    assert {name.rpartition(".")[0] for name in adapter.new} == modules
    assert drawn(folder, **options) <= set(adapter.new)


@pytest.fixture
def classifiers(tmp_path: Path) -> Iterator[tuple[hf_stitch.Adapter, hf_stitch.Adapter]]:
    folder = saved(tmp_path, hf.ViTModel(hf.ViTConfig(**IMAGES)))
    trained = hf.ViTForImageClassification(hf.ViTConfig(**IMAGES)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield loaded(folder, task="image-classification", processor=None), hf_stitch.load(trained)


LAYER = "vit.layers.0"
SAMPLES = torch.randn(60, 3, 32, 32)


def test_no_job_scores_a_new_head_without_being_told(classifiers: tuple[hf_stitch.Adapter, hf_stitch.Adapter]) -> None:
    new, trained = classifiers
    cut = {"source_layer": LAYER, "target_layer": LAYER, "progress": False}
    with pytest.raises(ValueError, match=r"(?s)randomly initialised weights: classifier.bias, classifier.w.*adapter.m"):
        hf_stitch.stitch(trained, new, SAMPLES, **cut)
    with pytest.raises(ValueError, match="has randomly initialised weights"):
        hf_stitch.stitch_grid(trained, new, SAMPLES, layers_a=[LAYER], layers_b=[LAYER], progress=False)
    stitched = hf_stitch.stitch(trained, trained, SAMPLES, **cut)
    with pytest.raises(ValueError, match="has randomly initialised weights"):
        hf_stitch.evaluate(stitched, [(sample, 0) for sample in SAMPLES], target=new, progress=False)
    hf_stitch.stitch(new, trained, SAMPLES, **cut)  # the head of the source does not run
    assert hf_stitch.stitch(trained, new, SAMPLES, task=None, **cut).task is None
    told = hf_stitch.load(new.model, processor=new.processor)
    assert told.new == () and hf_stitch.stitch(trained, told, SAMPLES, **cut).task == "image-classification"
    assert hf_stitch.compare(trained, new, SAMPLES, layers_a=[LAYER], layers_b=[LAYER], rows="mean", progress=False).n


# -- timm -------------------------------------------------------------------------------------------------------------
@pytest.fixture
def resnet(tmp_path: Path) -> Path:
    model = timm.create_model("resnet10t", num_classes=3, channels=(8, 8, 8, 8)).eval()
    timm.models.save_for_hf(model, tmp_path, model_args={"channels": (8, 8, 8, 8)}, safe_serialization=True)
    return tmp_path


def test_a_timm_network_with_other_classes_has_a_new_head(resnet: Path) -> None:
    assert hf_stitch.load(str(resnet)).new == hf_stitch.load(str(resnet), num_classes=0).new == ()
    assert hf_stitch.load(str(resnet), features_only=True).new == ()
    with pytest.warns(UserWarning, match=r"ResNet has new weights, which .*: fc.bias, fc.weight"):
        adapter = hf_stitch.load(str(resnet), num_classes=5)
    assert adapter.new == ("fc.bias", "fc.weight")
    with pytest.raises(ValueError, match="has randomly initialised weights"):
        hf_stitch.stitch(adapter, adapter, torch.rand(30, 3, 64, 64), source_layer="layer1.0", target_layer="layer1.0")


def test_feature_maps_of_a_timm_network_lack_no_head(tmp_path: Path) -> None:
    """The wrapper of a ViT removes the head, for which timm reports that its weights are missing."""
    timm.models.save_for_hf(timm.create_model("test_vit", num_classes=2), tmp_path, safe_serialization=True)
    assert hf_stitch.load(str(tmp_path), features_only=True).new == ()
    change(tmp_path, lambda name: name == "blocks.1.mlp.fc1.weight")
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp\.fc1\.weight"):
        hf_stitch.load(str(tmp_path), features_only=True)


@pytest.mark.parametrize(
    ("lacking", "options"),
    [
        ("layer2.0.conv1.weight", {}),
        ("layer2.0.bn1.running_var", {"num_classes": 5}),
    ],
)
def test_a_timm_network_requires_its_weights(lacking: str, options: Any, resnet: Path) -> None:
    change(resnet, lambda name: name == lacking)
    with pytest.raises(ValueError, match=lacking):
        hf_stitch.load(str(resnet), **options)


def test_unused_weights_of_a_timm_network_are_named(resnet: Path) -> None:
    change(resnet, lambda name: False, {"other": torch.ones(1)})
    with pytest.raises(ValueError, match=r'Unexpected key.*"other"'):
        hf_stitch.load(str(resnet))
    with pytest.warns(UserWarning, match=r"ResNet does not use weights of .*: other"):
        hf_stitch.load(str(resnet), num_classes=5)


def test_a_projection_that_timm_cannot_adapt_is_refused(tmp_path: Path) -> None:
    sizes = {"embed_dim": 16, "depth": 1, "num_heads": 2}
    model = timm.create_model("naflexvit_base_patch16_gap", num_classes=2, **sizes)
    timm.models.save_for_hf(model, tmp_path, model_args=sizes, safe_serialization=True)
    with pytest.raises(ValueError, match=r"lacks weights of NaFlexVit.*embeds.proj.weight"):
        hf_stitch.load(str(tmp_path), in_chans=1)


# -- half a snapshot --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("missing", "place"),
    [("model-00002-of", "cache"), ("index", "folder"), ("safetensors", "cache"), ("safetensors", "folder")],
)
def test_a_copy_that_is_incomplete_names_the_file(missing: str, place: str, tmp_path: Path) -> None:
    folder, options = tmp_path / "bert", {"processor": plain_tokenizer()}
    BODY.save_pretrained(folder, max_shard_size="20KB")
    name: str = str(folder)
    if place == "cache":
        commit = "a" * 40
        snapshot = tmp_path / "models--alice--bert" / "snapshots" / commit
        snapshot.parent.mkdir(parents=True)
        shutil.move(folder, snapshot)
        (tmp_path / "models--alice--bert" / "refs").mkdir()
        (tmp_path / "models--alice--bert" / "refs" / "main").write_text(commit)
        folder, name = snapshot, "alice/bert"
        options |= {"cache_dir": str(tmp_path), "local_files_only": True}
    assert hf_stitch.load(name, **options).new == ()
    (gone, *_) = files = [file for file in sorted(folder.iterdir()) if missing in file.name]
    for file in files:
        file.unlink()
    expected = "model.safetensors" if missing != "model-00002-of" else gone.name
    with pytest.raises(FileNotFoundError, match=rf"{name} could not be loaded: the copy .* is incomplete.*{expected}"):
        hf_stitch.load(name, **options)


def test_weights_in_another_format_are_to_be_saved_anew(tmp_path: Path) -> None:
    folder = saved(tmp_path, BODY)
    torch.save(load_file(tmp_path / NAME), tmp_path / "pytorch_model.bin")
    (tmp_path / NAME).unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors.*\(pytorch_model\.bin\) are not supported.*save"):
        loaded(folder)


# -- classes of a repository ------------------------------------------------------------------------------------------
CODE = """
import transformers


class OwnConfig(transformers.BertConfig):
    model_type = "own-bert"


class OwnModel(transformers.BertModel):
    config_class = OwnConfig

    @classmethod
    def from_pretrained(cls, *args, **options):
        model = super().from_pretrained(*args, **options)
        model.config.touched = True
        return model
"""


def test_classes_of_a_repository_are_checked_too(tmp_path: Path) -> None:
    saved(tmp_path, BODY)
    (tmp_path / "own.py").write_text(CODE)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own-bert", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = loaded(str(tmp_path), trust_remote_code=True)
        assert type(adapter.model).__name__ == "OwnModel" and adapter.model.config.touched
        change(tmp_path, lambda name: "pooler" in name)
        assert loaded(str(tmp_path), trust_remote_code=True).model.pooler is None
        change(tmp_path, lambda name: "layer.1.output.dense.weight" in name)
        with pytest.raises(ValueError, match=r"lacks weights of OwnModel.*layer.1.output.dense.weight"):
            loaded(str(tmp_path), trust_remote_code=True)


def test_a_loss_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(tmp_path, BODY, "pooler", extra={"one.too.many": torch.ones(2)})
    hf.utils.logging.enable_propagation()
    try:
        with pytest.warns(UserWarning, match="does not contain weights of the pooler") as caught:
            loaded(folder)
    finally:
        hf.utils.logging.disable_propagation()
    assert len(caught) == 2 and "BertModel does not use weights of" in str(caught[1].message)
    assert "one.too.many" in str(caught[1].message)
    assert "LOAD REPORT" not in caplog.text


class Nested(hf.BertModel):
    """A network that loads another one on its way, which lacks a pooler."""

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **options: Any) -> Any:
        hf.BertModel.from_pretrained(Path(name).parent / "other")
        return super().from_pretrained(name, *args, **options)


def test_a_network_that_is_loaded_on_the_way_does_not_count(tmp_path: Path) -> None:
    saved(tmp_path / "other", BODY, "pooler")
    reference = ModelReference.parse(saved(tmp_path / "own", BODY))
    model, new = complete(Nested.from_pretrained, reference, ("BertModel",), {})
    assert type(model) is Nested and new == ()


def test_loading_leaves_the_classes_of_transformers_as_they_were(tmp_path: Path) -> None:
    before = {kind: dict(vars(kind)) for kind in (hf.PreTrainedModel, PeftAdapterMixin, torch.nn.Module)}
    folder = saved(tmp_path, BODY, "layer.1.output.dense.bias")
    with pytest.raises(ValueError, match="lacks weights"):
        loaded(folder)
    assert all(dict(vars(kind)) == values for kind, values in before.items())


def test_networks_that_threads_load_are_tied(tmp_path: Path) -> None:
    """Loading in threads with transformers alone leaves weights untied, in each thread and for good."""
    folder, tied = saved(tmp_path, bert(hf.BertForMaskedLM)), list[bool]()

    def load() -> None:
        for _ in range(3):
            model = loaded(folder).model
            tied.append(model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tied) == 12 and all(tied)
