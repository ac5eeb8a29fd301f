"""Encoders of speech: of waveforms (wav2vec 2.0 and its kin), and of spectrograms (AST, Whisper)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_stitch.adapters.overrides.base import Override


class OfWaveforms(Override):
    """Models of ``input_values``, (batch, samples), which convolutions make frames of."""

    frames = 12

    def example(self, model: nn.Module) -> Mapping[str, Any]:
        """Noise of as many samples as make 12 frames."""
        config: Any = model.config
        samples = self.frames
        for kernel, stride in zip(config.conv_kernel[::-1], config.conv_stride[::-1], strict=True):
            samples = (samples - 1) * stride + kernel
        return {"input_values": torch.randn(2, samples, generator=torch.Generator().manual_seed(0))}


class OfSpectrograms(Override):
    """AST, which takes ``input_values``, (batch, frames, frequencies), of one length."""

    def example(self, model: nn.Module) -> Mapping[str, Any]:
        """Noise of that length."""
        config: Any = model.config
        size = (2, config.max_length, config.num_mel_bins)
        return {"input_values": torch.randn(size, generator=torch.Generator().manual_seed(0))}


class OfWhisper(Override):
    """Whisper, which takes ``input_features``, (batch, frequencies, frames), of one length, and in its decoder text."""

    def example(self, model: nn.Module) -> Mapping[str, Any] | None:
        """Noise of that length, and three tokens where there is a decoder; the decoder alone takes texts as others."""
        config: Any = model.config
        if model.main_input_name != "input_features":
            return None
        generator = torch.Generator().manual_seed(0)
        heard = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        if "decoder_input_ids" not in inspect.signature(model.forward).parameters:
            return {"input_features": heard}
        return {"input_features": heard, "decoder_input_ids": torch.full((2, 3), config.decoder_start_token_id)}
