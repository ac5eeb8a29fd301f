"""Towers of many families: their own copy changes nothing, wherever the map goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hf_stitch_towers.exchange import exchange
from hf_stitch_towers.places import tiles_for
from test_exchange import IMAGES, MARK, QUIET, SMALL, images, louder, words

import hf_stitch
from benchmarks.towers_zoo import Noise, encoder_of, network, prompted, read

FOLDED = {
    "idefics3": "vision", "cohere2_vision": "vision", "blip": "vision", "blip-2": "vision", "whisper": "audio",
    "voxtral": "audio",
}  # fmt: skip
STITCHED = {"gemma3": "norm", "siglip": "attention"}


def built(kind: str) -> Any:
    """A tiny network of a family, of which the image changes the outputs."""
    model: Any = louder(network(kind, read()[kind].model).eval())
    return model


@pytest.mark.parametrize("kind", [*FOLDED, *STITCHED])
def test_its_own_tower_changes_nothing(kind: str) -> None:
    model, part = built(kind), FOLDED.get(kind, "vision")
    encoder, same = encoder_of(model, part)
    data = images(200 if kind == "siglip" else 48)
    found = exchange(prompted(model), encoder, data, part, QUIET, matcher="lstsq")
    assert same and found.folded == (kind in FOLDED)
    assert found.folded or STITCHED[kind] in found.notes[1]
    row, other = found.scores["exchanged"], found.scores["another image"]
    if found.figures[0] == "cosine":
        assert row["cosine"].value == pytest.approx(1, abs=1e-5) and other["cosine"].value < 0.99
    else:
        assert row["kl_divergence"].value < 1e-6 and other["kl_divergence"].value > 1e-4


class StackConfig(hf.PretrainedConfig):
    model_type = "test_stack"
    hidden_size = 32


class Stack(hf.PreTrainedModel):
    """A tower without blocks: layers one after the other."""

    config_class = StackConfig
    main_input_name = "pixel_values"

    def __init__(self, config: StackConfig) -> None:
        super().__init__(config)
        self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 4, 4), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 1))
        self.post_init()

    def forward(self, pixel_values: torch.Tensor, **options: Any) -> Any:
        values = self.body(pixel_values).flatten(2).mT
        return hf.modeling_outputs.BaseModelOutput(last_hidden_state=values, hidden_states=(values,))


def test_a_tower_without_blocks_is_cut_behind_it() -> None:
    hf.AutoConfig.register("test_stack", StackConfig, exist_ok=True)
    hf.AutoModel.register(StackConfig, Stack, exist_ok=True)
    text = hf.LlamaConfig(**SMALL, vocab_size=60, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = hf.LlavaConfig(
        vision_config=StackConfig(), text_config=text, image_token_index=MARK, image_seq_length=16,
        vision_feature_select_strategy="full", vision_feature_layer=-1,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = louder(hf.LlavaForConditionalGeneration(config).eval())
    model.generation_config.update(eos_token_id=2, pad_token_id=0)
    example = {"pixel_values": torch.randn(2, 3, 16, 16), "input_ids": torch.tensor([[1, *[MARK] * 16, 5]] * 2)}
    old = hf_stitch.load(model, example_inputs=example, processor=Noise((3, 16, 16)))
    old = old.beside({"input_ids": example["input_ids"][0]})
    before = [name for name in old.layers if "language_model" not in name]
    assert before and "multi_modal_projector" in before[-1]
    torch.manual_seed(1)
    vit = hf.ViTModel(hf.ViTConfig(**SMALL, image_size=16, patch_size=8)).eval()
    found = exchange(old, hf_stitch.load(vit, processor=Noise((3, 16, 16))), images(48), "vision", QUIET)
    assert not found.folded and found.model.generate(**found.preprocess(images(2)), max_new_tokens=2).shape[0] == 2


def test_packed_patches_take_another_encoder() -> None:
    old = prompted(built("qwen2_vl"))
    assert old.spec("model.visual.merger").grid == old.interface.grids[0]
    torch.manual_seed(1)
    vit = hf.ViTModel(hf.ViTConfig(**SMALL, **IMAGES)).eval()
    found = exchange(old, hf_stitch.load(vit, processor=Noise((3, 16, 16))), images(48), "vision", QUIET)
    assert not found.folded and found.scores["mean only"]["kl_divergence"].value > 1e-4
    pixels, options = found.preprocess(images(2, seed=3)), {"max_new_tokens": 4, "min_new_tokens": 4}
    cached = found.model.generate(**pixels, **options)
    assert torch.equal(cached, found.model.generate(**pixels, **options, use_cache=False))


def llava_next() -> Any:
    """A network that divides images into tiles, with its processor."""
    torch.manual_seed(0)
    vision = hf.CLIPVisionConfig(**SMALL, **IMAGES)
    text = hf.LlamaConfig(**SMALL, vocab_size=60, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    points = [[16, 16], [16, 32]]
    config = hf.LlavaNextConfig(
        vision_config=vision, text_config=text, image_token_index=MARK, image_seq_length=16, image_grid_pinpoints=points
    )
    size: Any = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    processor = hf.LlavaNextProcessor(
        hf.LlavaNextImageProcessor(**size, image_grid_pinpoints=points), words(), patch_size=4,
        vision_feature_select_strategy="default", num_additional_image_tokens=1, image_token="<image>",
    )  # fmt: skip
    model: Any = louder(hf.LlavaNextForConditionalGeneration(config).eval())
    return hf_stitch.load(model, processor=processor, context="<image> w5 w6")


def test_tiles_are_normalised_as_the_new_tower_reads_them() -> None:
    old = llava_next()
    size: Any = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    processor = hf.CLIPImageProcessor(**size, image_mean=[0.5] * 3, image_std=[0.4] * 3)
    clip = hf.CLIPVisionModel(hf.CLIPVisionConfig(**{**SMALL, "hidden_size": 48}, **IMAGES)).eval()
    encoder = hf_stitch.load(clip, processor=processor)
    found = exchange(old, encoder, images(48), "vision", QUIET, matcher="ridge")
    assert found.folded and found.error < 1e-5 and not found.notes
    own = found.preprocess(images(3))["pixel_values"]
    assert own.shape == (3, 2, 3, 16, 16)
    torch.testing.assert_close(own, tiles_for(encoder, old.preprocess(images(3))["pixel_values"], old))
    blank = torch.zeros(1, 2, 3, 16, 16)
    assert not tiles_for(encoder, blank, old).any()  # tiles of zeros are padding
    plain = hf_stitch.load(clip, processor=lambda image: torch.zeros(3, 16, 16))
    with pytest.raises(ValueError, match="reads 2 tiles"):
        exchange(old, plain, images(48), "vision", QUIET)


def listener(layers: int) -> Any:
    """A tiny Whisper with its feature extractor."""
    torch.manual_seed(layers)
    small = {"d_model": 32, "encoder_layers": layers, "decoder_layers": 2, "encoder_attention_heads": 4}
    small |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 60}
    small |= {"max_source_positions": 50, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1}
    config = hf.WhisperConfig(**small, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
                              begin_suppress_tokens=None)  # fmt: skip
    model: Any = louder(hf.WhisperForConditionalGeneration(config).eval())
    return hf_stitch.load(model, processor=hf.WhisperFeatureExtractor(chunk_length=1))


def test_waveforms_are_heard_by_both_extractors(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    waves = [draw.normal(size=12_000 + place).astype("float32") for place in range(48)]
    found = exchange(listener(2), listener(3), waves, "audio", QUIET, matcher="ridge")
    assert found.folded and found.error < 1e-5 and not found.notes
    found.save_pretrained(tmp_path / "new")
    plain = hf.WhisperForConditionalGeneration.from_pretrained(tmp_path / "new")
    assert plain.config.encoder_layers == 3
    extractor: Any = hf.AutoFeatureExtractor.from_pretrained(tmp_path / "new")
    inputs = extractor(waves[:2], sampling_rate=16_000, return_tensors="pt")
    torch.testing.assert_close(inputs["input_features"], found.preprocess(waves[:2])["input_features"])
    options = {"max_new_tokens": 4, "min_new_tokens": 4}
    own = found.model.generate(**inputs, **options)
    assert torch.equal(plain.generate(**inputs, **options), own)
    other = hf_stitch.load(listener(3).model, processor=hf.WhisperFeatureExtractor(chunk_length=2, sampling_rate=8_000))
    with pytest.raises(ValueError, match="same sampling rate, got 8000 and 16000"):
        exchange(listener(2), other, waves, "audio", QUIET)
    with pytest.raises(ValueError, match="must be a waveform of one channel"):
        found.preprocess([np.zeros((2, 100), dtype="float32")])
