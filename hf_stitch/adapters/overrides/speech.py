"""Speech encoders: of waveforms (wav2vec 2.0 and related models) and of spectrograms (AST, Whisper)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_stitch.adapters.overrides.base import Override


class OfWaveforms(Override):
    """Override for models that turn ``input_values``, shape (batch, samples), into frames by convolutions."""

    frames = 12

    def example(self, model: nn.Module) -> Mapping[str, Any]:
        """Return two waveforms of noise with the number of samples that gives :attr:`frames` frames."""
        config: Any = model.config
        samples = self.frames
        for kernel, stride in zip(config.conv_kernel[::-1], config.conv_stride[::-1], strict=True):
            samples = (samples - 1) * stride + kernel
        return {"input_values": torch.randn(2, samples, generator=torch.Generator().manual_seed(0))}


class OfSpectrograms(Override):
    """Override for AST, which takes ``input_values``, shape (batch, frames, frequencies), of a fixed length."""

    def example(self, model: nn.Module) -> Mapping[str, Any]:
        """Return two spectrograms of noise of the length in the config."""
        config: Any = model.config
        size = (2, config.max_length, config.num_mel_bins)
        return {"input_values": torch.randn(size, generator=torch.Generator().manual_seed(0))}


class OfWhisper(Override):
    """Override for Whisper, which takes ``input_features`` of a fixed length, shape (batch, frequencies, frames).

    Its decoder takes texts.
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
