"""Overrides for families of networks of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_stitch.adapters.overrides import Override


class OfWaveforms(Override):
    """Override for models that turn ``input_values``, shape (batch, samples), into frames by convolutions."""

    frames = 12

    def example(self, model: nn.Module) -> Mapping[str, Any]:
        """Return two waveforms of noise with the number of samples for :attr:`frames` frames."""
        config: Any = model.config
        samples = self.frames
        for kernel, stride in zip(config.conv_kernel[::-1], config.conv_stride[::-1], strict=True):
            samples = (samples - 1) * stride + kernel
        return {"input_values": torch.randn(2, samples, generator=torch.Generator().manual_seed(0))}


class OfSpectrograms(Override):
    """Override for AST, with ``input_values`` of a fixed length, shape (batch, frames, frequencies)."""

    def example(self, model: nn.Module) -> Mapping[str, Any]:
        """Return two spectrograms of noise of the length in the config."""
        config: Any = model.config
        size = (2, config.max_length, config.num_mel_bins)
        return {"input_values": torch.randn(size, generator=torch.Generator().manual_seed(0))}


class OfWhisper(Override):
    """Override for Whisper, with ``input_features`` of a fixed length, shape (batch, frequencies, frames).

    Its decoder accepts texts.
    """

    def example(self, model: nn.Module) -> Mapping[str, Any] | None:
        """Return spectrograms of noise, with three tokens if the model has a decoder; ``None`` for a decoder alone."""
        config: Any = model.config
        if model.main_input_name != "input_features":
            return None
        generator = torch.Generator().manual_seed(0)
        spectrograms = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        if "decoder_input_ids" not in inspect.signature(model.forward).parameters:
            return {"input_features": spectrograms}
        return {"input_features": spectrograms, "decoder_input_ids": torch.full((2, 3), config.decoder_start_token_id)}


OLD_CLIP_EOS = 2
"""Wrong ``eos_token_id`` in the oldest configs of CLIP; the end of a text is in fact its largest id."""


class OfClipTexts(Override):
    """Override for text encoders with the last id of the vocabulary as end of text, despite the config."""

    def special_ids(self, model: nn.Module) -> tuple[int, ...]:
        """Return the last id of the vocabulary if the config has :data:`OLD_CLIP_EOS`."""
        config: Any = model.config
        return (config.vocab_size - 1,) if config.eos_token_id == OLD_CLIP_EOS else ()

    def example(self, model: nn.Module) -> Mapping[str, Any] | None:
        """Return texts of 6 tokens that end with the last id of the vocabulary."""
        config: Any = model.config
        if config.eos_token_id != OLD_CLIP_EOS:
            return None
        ids = torch.randint(3, config.vocab_size - 1, (2, 6), generator=torch.Generator().manual_seed(0))
        ids[:, -1] = config.vocab_size - 1
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class OfCpmAnt(Override):
    """Override for CPM-Ant, which always uses the id 0 for padding and ignores its config."""

    def special_ids(self, model: nn.Module) -> tuple[int, ...]:
        """Return the padding id, which the embeddings and the attention mask depend on."""
        return (0,)


class OfPerceiverTexts(Override):
    """Override for the heads that accept texts."""

    def example(self, model: nn.Module) -> Mapping[str, Any]:
        """Return random token ids, shape (2, 6), and their mask."""
        config: Any = model.config
        ids = torch.randint(6, config.vocab_size, (2, 6), generator=torch.Generator().manual_seed(0))
        return {"inputs": ids, "attention_mask": torch.ones_like(ids)}


class OfPerceiverImages(Override):
    """Override for the head that accepts images, with learned position embeddings."""

    def example(self, model: nn.Module) -> Mapping[str, Any]:
        """Return random images of the size of the position embeddings."""
        config: Any = model.config
        size = (2, 3, config.image_size, config.image_size)
        return {"inputs": torch.randn(size, generator=torch.Generator().manual_seed(0))}


class OfPatches(Override):
    """Override for the image classifier of SigLIP 2."""

    def example(self, model: nn.Module) -> Mapping[str, Any]:
        """Return two random images of 4 × 4 patches, with mask and grid sizes."""
        config: Any = getattr(model.config, "vision_config", model.config)
        pixels = config.num_channels * config.patch_size**2
        return {
            "pixel_values": torch.randn(2, 16, pixels, generator=torch.Generator().manual_seed(0)),
            "pixel_attention_mask": torch.ones(2, 16, dtype=torch.int32),
            "spatial_shapes": torch.full((2, 2), 4),
        }
