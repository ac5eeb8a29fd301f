"""Stitched models for classification of images, texts and tokens, and for masked language modelling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from transformers.modeling_outputs import (
    ImageClassifierOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from hf_stitch.artefacts.modeling import StitchedModel


class StitchedModelForImageClassification(StitchedModel):
    """Stitched model for image classification.

    :meth:`forward` returns an ``ImageClassifierOutput``: ``logits`` (batch, classes) and, with labels, the ``loss``.
    :func:`hf_stitch.stitch` builds it for targets of the task ``image-classification``.

    Args:
        config: The config.
        source: The front half. Default: ``source``, ``stitch`` and ``target`` are built from the config.
        stitch: The stitching layer.
        target: The back half.
        processor: The source's image processor.

    Example:
        >>> import hf_stitch
        >>> from torch import nn, randn
        >>> nets = [nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2)]
        >>> a, b = (hf_stitch.load(net, example_inputs=randn(2, 3, 2, 2)) for net in nets)
        >>> model = hf_stitch.stitch(a, b, randn(100, 3, 2, 2), source_layer="2", target_layer="2")
        >>> type(model).__name__, model(pixel_values=randn(5, 3, 2, 2)).logits.shape
        ('StitchedModelForImageClassification', torch.Size([5, 3]))
    """

    main_input_name = "pixel_values"
    supports_gradient_checkpointing = False  # most image networks do not support it
    auto_class: ClassVar[str] = "AutoModelForImageClassification"
    output_class = ImageClassifierOutput

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | int | Sequence[int] | None = None,
        output_attentions: bool | None = None,
        **inputs: Any,
    ) -> ImageClassifierOutput:
        """Classify images as in the base class; the signature shows the arguments of image networks."""
        return super().forward(
            pixel_values=pixel_values,
            labels=labels,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            **inputs,
        )


class StitchedModelForSequenceClassification(StitchedModel):
    """Stitched model for text classification.

    :meth:`forward` returns a ``SequenceClassifierOutput``: ``logits`` (batch, classes) and, with labels, the ``loss``.
    :func:`hf_stitch.stitch` builds it for targets of the task ``text-classification``.

    Args:
        config: The config.
        source: The front half. Default: ``source``, ``stitch`` and ``target`` are built from the config.
        stitch: The stitching layer.
        target: The back half.
        processor: The source's tokenizer.

    Example:
        >>> import torch, hf_stitch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
        >>> network = hf_stitch.load(BertForSequenceClassification(config).eval())
        >>> layer = "bert.encoder.layer.0"
        >>> spec = network.spec(layer)
        >>> identity = hf_stitch.stitches.IdentityStitch(8, 8)
        >>> stitch = hf_stitch.stitches.StitchingLayer(spec, spec, "none", identity)
        >>> model = hf_stitch.artefacts.joining.join(
        ...     network, layer, stitch, network, layer, task="text-classification"
        ... )
        >>> type(model).__name__, model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
        ('StitchedModelForSequenceClassification', torch.Size([1, 2]))
    """

    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    output_class = SequenceClassifierOutput


class StitchedModelForTokenClassification(StitchedModel):
    """Stitched model for token classification.

    :meth:`forward` returns a ``TokenClassifierOutput``: ``logits`` (batch, tokens, classes) and, with labels, the
    ``loss``, which ignores tokens with the label -100. :func:`hf_stitch.stitch` builds it for targets of the task
    ``token-classification``.
    """

    auto_class: ClassVar[str] = "AutoModelForTokenClassification"
    output_class = TokenClassifierOutput


class StitchedModelForMaskedLM(StitchedModel):
    """Stitched model for masked language modelling.

    :meth:`forward` returns a ``MaskedLMOutput``: ``logits`` (batch, tokens, vocabulary) and, with labels, the ``loss``,
    which ignores tokens with the label -100. :func:`hf_stitch.stitch` builds it for targets of the task ``fill-mask``.
    """

    auto_class: ClassVar[str] = "AutoModelForMaskedLM"
    output_class = MaskedLMOutput
