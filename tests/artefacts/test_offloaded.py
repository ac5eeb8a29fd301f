"""Networks with offloaded weights: cuts, hashes, comparisons, stitches, saving and loading equal those in memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import timm
import torch
import transformers as hf

import hf_stitch
from hf_stitch.offloading import State, is_offloaded
from hf_stitch.reference import weights_hash

from tiny_networks import TEXT, build, plain_tokenizer  # isort: skip

LAYERS = 4
TEXTS = [" ".join(f"w{(7 * i + 3 * j) % 38}" for j in range(3 + i % 6)) for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small causal model in bfloat16, with a tokenizer."""
    place = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = hf.LlamaConfig(**{**TEXT, "num_hidden_layers": LAYERS}, num_key_value_heads=2, pad_token_id=0)
    hf.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(place)
    plain_tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def offloaded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "disk"}
    places |= {f"model.layers.{number}": "disk" for number in range(LAYERS)}
    return hf_stitch.load(str(folder), device_map=places, offload_folder=tmp_path_factory.mktemp("disk"))


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    return hf_stitch.load(str(folder))


@pytest.fixture(scope="module")
def inputs(whole: Any) -> dict[str, torch.Tensor]:
    return dict(whole.processor(TEXTS[:4], return_tensors="pt", padding=True, return_token_type_ids=False))


def test_the_hash_and_each_entry_of_the_state_are_as_in_memory(offloaded: Any, whole: Any, folder: Path) -> None:
    assert is_offloaded(offloaded.model) and not is_offloaded(whole.model)
    assert weights_hash(offloaded.model) == weights_hash(whole.model)
    assert sum(p.is_meta for p in offloaded.model.parameters()) == 9 * LAYERS + 1  # all are still on the disk
    with torch.device("meta"):
        empty = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.from_pretrained(folder))
    with pytest.raises(ValueError, match="on the meta device"):
        weights_hash(empty)
    state, expected = State(offloaded.model), whole.model.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert {value.device.type for value in state.described.values()} == {"meta"}


@pytest.fixture(scope="module")
def stitched(offloaded: Any, whole: Any) -> tuple[Any, Any]:
    """Stitched models with the offloaded network as the target, and with the same network in memory."""
    cut: dict[str, Any] = {"source_layer": "model.layers.1", "target_layer": "model.layers.2"}
    return tuple(hf_stitch.stitch(whole, target, TEXTS, **cut) for target in (offloaded, whole))  # type: ignore[return-value]


def test_stitching_and_saving_equal_those_in_memory(
    stitched: tuple[Any, Any], tmp_path: Path, inputs: dict[str, torch.Tensor]
) -> None:
    found, expected = stitched
    assert is_offloaded(found)
    assert torch.equal(found(**inputs).logits, expected(**inputs).logits)
    assert found.evaluation.to_dict() == expected.evaluation.to_dict()
    files = []
    for name, model in (("found", found), ("expected", expected)):
        model.save_pretrained(tmp_path / name, max_shard_size="20KB")
        files.append({path.name: path.read_bytes() for path in (tmp_path / name).glob("model-*.safetensors")})
    assert files[0] == files[1] and len(files[0]) > 2
    again = hf_stitch.StitchedModel.from_pretrained(tmp_path / "found")
    assert torch.equal(again(**inputs).logits, expected(**inputs).logits)


def test_generation_with_a_cache_equals_that_in_memory(
    stitched: tuple[Any, Any], tmp_path: Path, inputs: dict[str, torch.Tensor]
) -> None:
    """Weights on the disk have no device of their own."""
    offloaded, whole = stitched
    whole.save_pretrained(tmp_path)
    disk = {"source": "disk", "stitch": "cpu", "target": "cpu"}
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = whole.generate(**inputs, **options)
    for model in (offloaded, hf_stitch.StitchedModel.from_pretrained(tmp_path, device_map=disk)):
        assert torch.equal(model.generate(**inputs, **options), expected)
        assert model.uncached is None and model.cache_is_checked


MAPS: list[Any] = ["auto", {"": "disk"}, {"source": "cpu", "stitch": "cpu", "target": "disk"}, "cpu"]


@pytest.mark.parametrize("device_map", MAPS, ids=["auto", "disk", "target", "cpu"])
def test_a_stitched_model_is_loaded_onto_several_devices(
    stitched: tuple[Any, Any], tmp_path: Path, inputs: dict[str, torch.Tensor], device_map: Any
) -> None:
    stitched[1].save_pretrained(tmp_path / "saved")
    memory: Any = {"cpu": "40KB"} if device_map == "auto" else None
    model = hf_stitch.StitchedModel.from_pretrained(tmp_path / "saved", device_map=device_map, max_memory=memory)
    assert is_offloaded(model) == (device_map != "cpu")
    assert torch.equal(model(**inputs).logits, stitched[1](**inputs).logits)
    assert is_offloaded(model) == (device_map != "cpu")  # what a forward loads does not stay
    if device_map == "auto":
        blocks = [name.partition(".layers.")[2] for name in model.hf_device_map if ".layers." in name]
        assert {block.partition(".")[2] for block in blocks} <= {"", "inner"}  # whole; inner: the one at the cut
        assert "disk" in model.hf_device_map.values()
    model.save_pretrained(tmp_path / "again")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("saved", "again")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"device_map": "everywhere"}, "device_map must be a device, 'auto'"),
        ({"device_map": "auto", "dtype": torch.float32}, "dtype cannot be changed while weights are distributed"),
        ({"device_map": "cpu", "max_memory": {"cpu": "1GB"}}, "max_memory requires device_map='auto'"),
        ({"device_map": {"source": "cpu"}}, "does not give any device"),
    ],
)
def test_bad_maps(stitched: tuple[Any, Any], tmp_path: Path, options: dict[str, Any], message: str) -> None:
    stitched[1].save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        hf_stitch.StitchedModel.from_pretrained(tmp_path, **options)


def test_tied_weights(tmp_path: Path) -> None:
    """tests/adapters/test_base_models.py cuts such networks."""
    whole: Any = build("gpt2", 0)
    whole.save_pretrained(tmp_path / "tied")
    options: dict[str, Any] = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "disk"}
    offloaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "tied", **options)
    assert whole.config.tie_word_embeddings and is_offloaded(offloaded)
    assert weights_hash(offloaded) == weights_hash(whole)


def test_weights_of_modules_around_the_cut(tmp_path: Path) -> None:
    """Position embeddings of timm's ViT belong to the network itself, whose forward ends early in a front half."""
    network = timm.create_model("vit_tiny_patch16_224", depth=3, num_classes=5, img_size=32).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    whole = hf_stitch.load(copy.deepcopy(network), example_inputs=images)
    offloaded = hf_stitch.load(accelerate.disk_offload(network, tmp_path, torch.device("cpu")), example_inputs=images)
    for layer in ("blocks.0", "blocks.1"):
        front, back = offloaded.front(layer), offloaded.back(layer)
        for _ in range(2):
            assert torch.equal(back(front(x=images)), whole.model(images))
    assert weights_hash(offloaded.model) == weights_hash(whole.model)
