"""Networks of images and texts: examples, exact cuts in all parts, samples with both, stitches and generation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from hf_stitch_towers import ImageAndTextProcessor, ImageTextAdapter
from hf_stitch_towers.inputs import inputs_of
from hf_stitch_towers.library import ImageText
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

import hf_stitch
from hf_stitch import Samples
from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.adapters.cutting.interface import Interface

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
WORDS = 40
MARK = 39
QUIET: dict[str, Any] = {"progress": False}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ ' ' + part['text'] }}{% endif %}{% endfor %}{% endfor %} w9"
)


def noisy(model: Any) -> Any:
    """Give every weight a value, so that no cut is exact because something is zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)
    return model.eval()


def vision(**more: Any) -> dict[str, Any]:
    return {**SIZES, "image_size": 24, "patch_size": 8, **more}


def words(**more: Any) -> dict[str, Any]:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {**SIZES, "vocab_size": WORDS, "max_position_embeddings": 64, **special, **more}


def llava() -> Any:
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision()),
        text_config=transformers.LlamaConfig(**words(num_key_value_heads=2)),
        image_token_id=MARK,
        image_token_index=MARK,
    )
    return noisy(transformers.LlavaForConditionalGeneration(config))


def paligemma() -> Any:
    torch.manual_seed(0)
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**vision()).to_dict(),
        text_config=transformers.GemmaConfig(**words(num_key_value_heads=1, head_dim=8)).to_dict(),
        projection_dim=32,
        hidden_size=32,
        image_token_index=MARK,
        image_token_id=MARK,
        vocab_size=WORDS,
    )
    return noisy(transformers.PaliGemmaForConditionalGeneration(config))


def captioner() -> Any:
    torch.manual_seed(0)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**vision()),
        transformers.GPT2Config(
            vocab_size=WORDS, n_embd=32, n_layer=3, n_head=4, n_positions=64, add_cross_attention=True, bos_token_id=1,
            eos_token_id=2,
        ),
    )  # fmt: skip
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return noisy(transformers.VisionEncoderDecoderModel(config))


def blip() -> Any:
    torch.manual_seed(0)
    text = {**words(), "encoder_hidden_size": 32}
    config = transformers.BlipConfig(vision_config=vision(), text_config=text, projection_dim=16)
    return noisy(transformers.BlipForConditionalGeneration(config))


def clip() -> Any:
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        vision_config=vision(), text_config=words(max_position_embeddings=32), projection_dim=16
    )
    return noisy(transformers.CLIPModel(config))


def qwen() -> Any:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    config = transformers.Qwen2VLConfig(
        vision_config={
            "embed_dim": 32, "hidden_size": 32, "depth": 3, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2,
            "temporal_patch_size": 1, "spatial_merge_size": 2,
        },
        text_config=words(num_key_value_heads=2, rope_parameters=rope),
        image_token_id=MARK, video_token_id=38, vision_start_token_id=37, vision_end_token_id=36,
    )  # fmt: skip
    return noisy(transformers.Qwen2VLForConditionalGeneration(config))


def next_tiles() -> Any:
    torch.manual_seed(0)
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**vision()),
        text_config=transformers.LlamaConfig(**words(num_key_value_heads=2)),
        image_token_id=MARK, image_token_index=MARK, image_grid_pinpoints=[[24, 24], [24, 48]],
    )  # fmt: skip
    return noisy(transformers.LlavaNextForConditionalGeneration(config))


def whisper() -> Any:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=WORDS, d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=20,
        max_target_positions=32, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return noisy(transformers.WhisperForConditionalGeneration(config))


def idefics() -> Any:
    torch.manual_seed(0)
    config = transformers.Idefics3Config(
        vision_config={**vision(), "patch_size": 6},
        text_config=transformers.LlamaConfig(**words(num_key_value_heads=2)),
        image_token_id=MARK, scale_factor=2, pad_token_id=0,
    )  # fmt: skip
    return noisy(transformers.Idefics3ForConditionalGeneration(config))


JOINED = ("model.multi_modal_projector",)
NETWORKS = {
    "llava": (llava, 6, ("model.vision_tower.encoder.layers.0", *JOINED, "model.language_model.layers.2")),
    "paligemma": (paligemma, 4, ("model.vision_tower.encoder.layers.2", *JOINED)),
    "idefics": (idefics, 6, ("model.vision_model.encoder.layers.0", "model.connector", "model.text_model.layers.1")),
    "captioner": (captioner, 3, ("encoder.layers.0", "encoder.layernorm", "decoder.transformer.h.2")),
    "blip": (blip, 3, ("vision_model.encoder.layers.1",)),
    "clip": (clip, 3, ("vision_model.encoder.layers.0", "visual_projection")),
    "qwen": (qwen, 4, ("model.visual.blocks.0", "model.visual.merger", "model.language_model.layers.1")),
    "llava-next": (next_tiles, 4, ("model.vision_tower.encoder.layers.0", "model.language_model.layers.1")),
    "whisper": (whisper, 3, ("model.encoder.layers.0", "model.decoder.layers.2")),
}  # fmt: skip
"""Name -> network, least number of its cuts, and some of them."""


def processor(network: Any) -> Any:
    names = ["[PAD]", "<s>", "</s>", "[UNK]", *(f"w{i}" for i in range(4, MARK)), "<image>"]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=["<image>"], padding_side="left",
    )  # fmt: skip
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
    return transformers.LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1,
    )  # fmt: skip


def pictures(count: int = 40) -> list[Image.Image]:
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 255, (30, 26, 3), dtype=np.uint8)) for _ in range(count)]


def texts(count: int = 40) -> list[str]:
    return [" ".join(f"w{4 + (7 * i + k) % 30}" for k in range(2 + i % 3)) for i in range(count)]


def tower() -> hf_stitch.Adapter:
    torch.manual_seed(3)
    config = transformers.ViTConfig(**{**vision(), "hidden_size": 16, "image_size": 32})
    made = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    return hf_stitch.load(noisy(transformers.ViTModel(config)), processor=made)


@pytest.fixture(scope="module")
def reader() -> ImageTextAdapter:
    """LLaVA with its processor and a fixed context."""
    network = llava()
    found = hf_stitch.load(network, processor=processor(network), context="w5 w6 w7")
    assert isinstance(found, ImageTextAdapter)
    return found


@pytest.fixture(scope="module")
def bare(reader: ImageTextAdapter) -> hf_stitch.Adapter:
    """The same without a context."""
    return hf_stitch.load(reader.model, processor=reader.processor)


# -- loading and cuts -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NETWORKS)
def test_a_bare_network_has_exact_cuts_in_all_its_parts(name: str) -> None:
    make, least, some = NETWORKS[name]
    network = make()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    adapter = hf_stitch.load(network)
    assert isinstance(adapter, ImageTextAdapter)
    layers = adapter.layers
    assert len(layers) >= least and set(some) <= set(layers), layers
    inputs = adapter._survey()._probes.vary(3)
    content = adapter.interface.content[0]
    inputs[content] = torch.randn(inputs[content].shape, generator=torch.Generator().manual_seed(5))
    with torch.no_grad(), evaluating(network):
        expected = network(**{**adapter.interface.options, **inputs})
        for layer in layers:
            representation = adapter.encode(inputs, layer)[layer]
            erased = representation.context[content]
            assert erased.unique().numel() == 1 and representation.batch == 3
            found = adapter.decode(representation, layer)
            assert all(torch.equal(found[key], expected[key]) for key in adapter.interface.outputs), layer
            half = adapter.back(layer)(adapter.front(layer)(**inputs))
            assert all(torch.equal(half[key], expected[key]) for key in adapter.interface.outputs), layer
    assert not network.training and all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


def test_positions_of_the_text_and_of_the_image_are_told_apart(reader: ImageTextAdapter) -> None:
    rows = [{"image": image, "text": text} for image, text in zip(pictures(3), texts(3), strict=True)]
    inputs = reader.preprocess(rows)
    found = reader.encode(inputs, ["model.multi_modal_projector", "model.language_model.layers.0"])
    image, stream = found.values()
    assert image.grid == (3, 3) and image.mask is None
    assert stream.mask is not None and torch.equal(stream.mask, inputs["attention_mask"].bool())
    marks = inputs["input_ids"] == MARK
    assert marks.sum(1).tolist() == [9, 9, 9] and torch.equal(stream.context["input_ids"] == MARK, marks)


@pytest.mark.parametrize("text", ["w5", "w5 w6 w7 w8 w9 w10 w11 w12"])
def test_cuts_hold_for_texts_of_other_lengths(reader: ImageTextAdapter, text: str) -> None:
    inputs = reader.preprocess([{"image": image, "text": text} for image in pictures(2)])
    with torch.no_grad():
        expected = reader.model(**inputs, use_cache=False).logits
        for layer in reader.layers:
            assert torch.equal(reader.decode(reader.encode(inputs, layer)[layer], layer).logits, expected)


def test_rows_with_fewer_images_are_padded_with_images_of_zeros() -> None:
    adapter = hf_stitch.load(idefics())
    pixels = torch.randn(2, 2, 3, 24, 24)
    pixels[1, 1] = 0
    words = torch.full((1, 4), MARK)
    ids = torch.stack(
        [
            torch.cat([torch.tensor([5]), words[0], torch.tensor([6]), words[0], torch.tensor([7])]),
            torch.cat([torch.tensor([5]), words[0], torch.tensor([6, 8, 9, 10, 11, 7])]),
        ]
    )
    inputs = {"pixel_values": pixels, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    again = hf_stitch.load(adapter.model, example_inputs=inputs)
    with torch.no_grad():
        expected = adapter.model(**inputs, use_cache=False).logits
        for layer in ("model.text_model.layers.0", "model.text_model.layers.2"):
            representation = again.encode(inputs, layer)[layer]
            assert representation.context["pixel_values"].flatten(2).any(2).tolist() == [[True, True], [True, False]]
            assert torch.equal(again.decode(representation, layer).logits, expected)


def test_the_text_can_be_the_content() -> None:
    for make, layer in ((clip, "text_model.encoder.layers.1"), (llava, "model.language_model.layers.1")):
        adapter = hf_stitch.load(make(), content="text")
        assert adapter.interface.content == ("input_ids",) and layer in adapter.layers
        assert make is not clip or list(adapter.forward(adapter.example)) == ["text_embeds"]
        inputs = adapter.example
        with torch.no_grad():
            expected = adapter.forward(inputs)
            found = adapter.decode(adapter.encode(inputs, layer)[layer], layer)
        assert all(torch.equal(found[key], expected[key]) for key in found)


def test_networks_of_other_kinds_are_left_to_their_libraries() -> None:
    library = ImageText()
    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2)
    assert not library.serves(transformers.GPT2Model(config)) and not library.serves(tower().model)
    assert not library.reads({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    assert library.reads({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]})
    assert not library.reads({"model_type": "hf_stitch"}) and not library.reads({"model_type": "clip"})


def test_a_network_is_loaded_from_a_folder_with_its_processor(tmp_path: Path) -> None:
    network = llava()
    network.save_pretrained(tmp_path)
    processor(network).save_pretrained(tmp_path)
    adapter = hf_stitch.load(str(tmp_path), context="w5 w6")
    assert isinstance(adapter, ImageTextAdapter) and type(adapter.processor).__name__ == "LlavaProcessor"
    assert adapter.preprocess(pictures(2))["input_ids"].shape == (2, 11)
    assert adapter.pinned.weights_hash and adapter.pinned.processor


# -- samples ------------------------------------------------------------------------------------------------------
def test_samples_of_an_image_and_a_text(reader: ImageTextAdapter) -> None:
    rows = [{"picture": image, "caption": text} for image, text in zip(pictures(4), texts(4), strict=True)]
    stored = datasets.Dataset.from_list(
        rows, features=datasets.Features(picture=datasets.Image(), caption=datasets.Value("string"))
    )
    for data in (rows, stored, Samples.of(rows, image="picture", text="caption")):
        samples = Samples.of(data)
        assert samples.modality == "image and text" and repr(samples) == "Samples(4 x image and text)"
        batch = next(samples.batches(4))
        assert [row["text"] for row in batch.samples] == texts(4) and batch.samples[0]["image"].size == (26, 30)
        assert reader.preprocess(batch.samples)["input_ids"].shape == (4, 13)
    assert Samples.of(rows).fingerprint != Samples.of(rows, image="picture").fingerprint
    image_alone = tower().preprocess(next(Samples.of(rows).batches(4)).samples)
    assert torch.equal(image_alone["pixel_values"], tower().preprocess(pictures(4))["pixel_values"])


def test_the_chat_template_makes_the_marks() -> None:
    network = llava()
    made = processor(network)
    made.chat_template = TEMPLATE
    adapter = hf_stitch.load(network, processor=made, context="w5")
    assert adapter.preprocess(pictures(1))["input_ids"].tolist() == [[*[MARK] * 9, 5, 9]]


def test_several_images_of_a_sample() -> None:
    network = llava()
    adapter = hf_stitch.load(network, processor=processor(network))
    inputs = adapter.preprocess([{"image": pictures(2), "text": "w5"}, {"image": pictures(2), "text": "w6"}])
    assert inputs["pixel_values"].shape == (4, 3, 24, 24) and (inputs["input_ids"] == MARK).sum(1).tolist() == [18, 18]
    example = {**inputs}
    with pytest.raises(
        ValueError, match=r"LlavaFor.* is cut for 1 rows of pixel_values per sample, got 4 rows for 2 samples"
    ):
        adapter.encode(inputs, "model.language_model.layers.0")
    twice = hf_stitch.load(network, example_inputs=example, processor=processor(network))
    layer = "model.language_model.layers.0"
    assert twice.interface.packed == ("pixel_values",) and layer in twice.layers
    with torch.no_grad():
        found = twice.decode(twice.encode(inputs, layer)[layer], layer).logits
        assert torch.equal(found, network(**inputs, use_cache=False).logits)


PICTURE = pictures(1)[0]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"text": "w5"}], r"sample 0 must contain image, got text: pass"),
        ([{"image": None, "text": "w5"}], r"sample 0 lacks its image \(None\): omit"),
        ([{"image": PICTURE, "text": None}], r"sample 0 lacks its text \(None\): omit"),
        ([], "at least one sample"),
        ([{"image": PICTURE, "text": " ".join(["w5"] * 70)}], r"has 79 tokens, .* accepts at most 64: shorten"),
        ([PICTURE], r'LlavaForConditionalGeneration requires input_ids .* sample 0 lacks a text.*context="Describe'),
        ([1.0], "the text of sample 0 lacks the image placeholder token"),
        ([1.0, float("nan")], "image 1 contains values that are NaN or infinite"),
    ],
)
def test_bad_samples_are_named(bare: Any, samples: list[Any], message: str) -> None:
    def made(sample: Any) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.full((3, 24, 24), float(sample)), "input_ids": torch.tensor([5, 6])}

    own = bool(samples) and isinstance(samples[0], float)
    with pytest.raises(ValueError, match=message):
        (hf_stitch.load(bare.model, processor=made) if own else bare).preprocess(samples)


class Patches:
    """Processor that returns one patch for the first image and three for the rest; the second patch is NaN."""

    def __init__(self, grid: bool) -> None:
        self.grid = grid

    def save_pretrained(self, folder: Any) -> None: ...

    def __call__(self, images: list[Any], text: list[str], **options: Any) -> dict[str, torch.Tensor]:
        counts = torch.tensor([1, *[3] * (len(images) - 1)])
        pixels = torch.ones(int(counts.sum()), 4)
        pixels[1] = torch.nan
        grid = {"image_grid_thw": torch.stack([counts, *[torch.ones_like(counts)] * 2], 1)} if self.grid else {}
        return {"pixel_values": pixels, "input_ids": torch.full((len(text), 2), 5), **grid}


@pytest.mark.parametrize(("grid", "message"), [(True, "image 1 contains"), (False, "image among 0 to 1 contains")])
def test_patches_that_are_not_finite_name_their_sample(grid: bool, message: str) -> None:
    interface = Interface(("pixel_values",), "image", {"pixel_values": (1, 4)}, packed=("pixel_values",))
    samples = [{"image": image, "text": "w5"} for image in pictures(2)]
    with pytest.raises(ValueError, match=message):
        inputs_of(samples, Patches(grid), interface, torch.nn.Linear(1, 1))


def test_an_error_of_the_processor_is_reported_for_several_images_of_a_sample() -> None:
    def fails(**inputs: Any) -> None:
        raise KeyError("tiles")

    fails.save_pretrained = None  # type: ignore[attr-defined]
    interface = Interface(("pixel_values",), "image", {"pixel_values": (3, 24, 24)})
    for count in (1, 2):
        samples = [{"image": pictures(count), "text": "w5"}]
        with pytest.raises(ValueError, match=r"does not accept the samples 0 to 0 \(KeyError: 'tiles'\)"):
            inputs_of(samples, fails, interface, torch.nn.Linear(1, 1))


def test_images_and_texts_are_optional_for_a_joint_processor() -> None:
    joint = ImageAndTextProcessor(transformers.ViTImageProcessor(), lambda text, **options: {"input_ids": text})
    assert joint(text=["w5"], padding=True) == {"input_ids": ["w5"]}
    assert joint(images=pictures(2))["pixel_values"].shape == (2, 3, 224, 224)


# -- stitches -----------------------------------------------------------------------------------------------------
PLACES = ("model.vision_tower.encoder.layers.0", "model.multi_modal_projector", "model.language_model.layers.1")


@pytest.mark.parametrize("layer", PLACES)
def test_a_network_that_is_stitched_to_itself_computes_and_generates_the_same(reader: Any, layer: str) -> None:
    rows = [{"image": image, "text": text} for image, text in zip(pictures(20), texts(20), strict=True)]
    for data in (rows, pictures(20)):
        itself = hf_stitch.stitch(
            reader, reader, data, source_layer=layer, target_layer=layer, matcher="identity", **QUIET
        )
        assert itself.evaluation["agreement"].value == 1.0 and itself.evaluation["kl_divergence"].value == 0.0
    inputs = reader.preprocess(pictures(3))
    with torch.no_grad():
        assert torch.equal(itself(**inputs).logits, reader.model(**inputs, use_cache=False).logits)
        alone = {"pixel_values": inputs["pixel_values"]}
        assert torch.equal(itself(**alone).logits, itself(**inputs).logits)  # the context is that of loading
        own = reader.preprocess(rows[:3])
        assert torch.equal(itself(**own).logits, reader.model(**own, use_cache=False).logits)
    asked = {"max_new_tokens": 4, "min_new_tokens": 4}
    for given in (inputs, own):
        expected = reader.model.generate(**given, **asked, do_sample=False)
        assert torch.equal(itself.generate(**given, **asked, use_cache=False), expected)
        if itself.uncached is None:
            assert torch.equal(itself.generate(**given, **asked, use_cache=True), expected)
            beams = {"num_beams": 2, "do_sample": False}
            assert torch.equal(
                itself.generate(**given, **asked, **beams), reader.model.generate(**given, **asked, **beams)
            )
        else:
            with pytest.raises(ValueError, match="generates without a cache, because the target is cut in its decoder"):
                itself.generate(**given, **asked, use_cache=True)


@pytest.mark.parametrize(
    ("layer", "of_rows"), [(PLACES[0], False), (PLACES[1], True)], ids=["tower, one context", "projector, own texts"]
)
def test_an_image_network_is_stitched_into_tower_and_projector(
    reader: Any, layer: str, of_rows: bool, tmp_path: Path
) -> None:
    source = tower()
    rows = [{"image": image, "text": text} for image, text in zip(pictures(), texts(), strict=True)]
    data: list[Any] = rows if of_rows else pictures()
    stitched = hf_stitch.stitch(
        source, reader, data, source_layer="layers.0", target_layer=layer, matcher="ridge", **QUIET
    )
    assert 0 <= stitched.evaluation["agreement"].value <= 1
    again = hf_stitch.evaluate(stitched, data[:10], **QUIET, batch_size=3)
    assert again["kl_divergence"].value == pytest.approx(
        hf_stitch.evaluate(stitched, data[:10], **QUIET, batch_size=10)["kl_divergence"].value, rel=1e-4
    )
    pixels = source.preprocess(pictures(3))
    context = {name: value for name, value in reader.preprocess(data[:3]).items() if name != "pixel_values"}
    with torch.no_grad():
        mapped = stitched.stitch(source.encode(pixels, "layers.0")["layers.0"])
        expected = reader.decode(mapped.replace(context={**context, "pixel_values": torch.zeros(3, 3, 24, 24)}), layer)
        assert torch.allclose(stitched(**pixels, **context).logits, expected.logits, atol=1e-5)
    asked = {"max_new_tokens": 4, "min_new_tokens": 4}
    given = {**pixels, **context} if of_rows else dict(pixels)
    written = stitched.generate(**given, **asked)
    assert written.shape[1] == context["input_ids"].shape[1] + 4
    assert torch.equal(stitched.generate(**given, **asked, use_cache=False), written)
    stitched.save_pretrained(tmp_path)
    loaded = hf_stitch.StitchedModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(**given).logits, stitched(**given).logits)
    assert torch.equal(loaded.generate(**given, **asked), written)
    assert {"source.layers.0", f"target.{layer}"} <= set(hf_stitch.load(loaded).layers)


@pytest.mark.parametrize("make", [captioner, blip, paligemma], ids=["captioner", "blip", "paligemma"])
def test_captioners_of_other_kinds_generate_from_their_towers(make: Any) -> None:
    network = make()
    plain = hf_stitch.load(network)
    name = plain.interface.given[0]
    example = {key: value[:1] for key, value in plain.example.items()}
    context = {key: value[0] for key, value in example.items() if key not in plain.interface.content}
    adapter = plain.beside({**context, name: context[name]})
    layer = adapter.layers[0]
    itself = hf_stitch.artefacts.joining.joined_to_itself(adapter, layer, adapter.task)
    inputs = adapter._survey()._probes.vary(2)
    with torch.no_grad():
        expected = network(**{**adapter.interface.options, **inputs}).logits
        assert torch.equal(itself(**inputs).logits, expected)
    asked = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    expected = network.generate(**inputs, **asked)
    assert torch.equal(itself.generate(**inputs, **asked), expected)
    assert torch.equal(itself.generate(**inputs, **asked, use_cache=False), expected)


def test_two_towers_are_stitched_and_compared() -> None:
    images = torch.randn(40, 3, 24, 24)
    ids = torch.tensor([5, 6, 2])
    adapter = hf_stitch.load(clip(), context={"input_ids": ids})
    atlas = hf_stitch.compare(
        adapter, adapter, images, layers_a=adapter.layers[:2], layers_b=adapter.layers[:2], **QUIET
    )
    assert atlas["linear_cka"].diagonal() == pytest.approx(1.0)
    layer = "vision_model.encoder.layers.1"
    itself = hf_stitch.stitch(
        adapter, adapter, images, source_layer=layer, target_layer=layer, matcher="identity", **QUIET
    )
    assert itself.evaluation["r2"].value == pytest.approx(1.0)


def stitched_into(reader: Any, layer: str) -> Any:
    return hf_stitch.stitch(tower(), reader, pictures(20), source_layer="layers.0", target_layer=layer, **QUIET)


LINEAR = {"example_inputs": torch.ones(2, 2), "context": "w5"}
REFUSALS: dict[str, Callable[[Any, Any], object]] = {
    r"content must be 'image' or 'text', or an argument of LlavaFor.*got 'sound'": lambda reader, bare: hf_stitch.load(
        reader.model, content="sound"
    ),
    "Linear does not accept a context": lambda reader, bare: hf_stitch.load(torch.nn.Linear(2, 2), **LINEAR),
    "requires a processor for the context 'w5'": lambda reader, bare: hf_stitch.load(reader.model, context="w5"),
    "context lacks input_ids, got attention_mask": lambda reader, bare: hf_stitch.load(
        reader.model, context={"attention_mask": [1]}
    ),
    "only one of them is a grid": lambda reader, bare: stitched_into(reader, PLACES[2]),
    "LlavaFor.* requires input_ids with images": lambda reader, bare: stitched_into(bare, PLACES[1]),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_is_refused(message: str, reader: Any, bare: Any) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSALS[message](reader, bare)
