"""From raw samples to a model's inputs: one way for adapters and stitched models."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .cut import MASK, Interface


def preprocess(samples: Sequence[Any], processor: Any, interface: Interface, model: nn.Module) -> dict[str, Tensor]:
    """Raw samples as the inputs of a model, on its device and in its dtype.

    Args:
        samples: Texts (or pairs of texts), images, arrays or tensors. Tensors are taken as preprocessed.
        processor: A tokenizer or image processor of transformers, or a function from one sample to one tensor;
            ``None`` for tensors.
        interface: How the model takes its input.
        model: The model (or a part of it) that the inputs are for.

    Returns:
        The keyword arguments of its forward. Texts are padded together; those over the model's limit are cut, with a
        warning that counts them.

    Raises:
        ValueError: If there are no samples, no processor for their kind, or they do not stack.
    """
    if not len(samples):
        raise ValueError("there are no samples to preprocess")
    parameter = next(model.parameters(), torch.zeros(()))
    if interface.modality == "text" and not isinstance(samples[0], Tensor):
        inputs = _tokenize(samples, processor, interface)
    elif processor is not None and hasattr(processor, "image_mean") and not isinstance(samples[0], Tensor):
        (name,) = interface.content
        mode = "L" if interface.shapes[name][0] == 1 else "RGB"
        inputs = processor(
            images=[s.convert(mode) if hasattr(s, "convert") else s for s in samples], return_tensors="pt"
        )
    else:
        inputs = {interface.content[0]: _stack(samples, processor)}
    dtype = parameter.dtype
    return {n: v.to(parameter.device, dtype if v.is_floating_point() else v.dtype) for n, v in inputs.items()}


def _tokenize(samples: Sequence[Any], tokenizer: Any, interface: Interface) -> dict[str, Tensor]:
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: pass processor= to hf_stitch.load, or save one beside the model")
    if tokenizer.pad_token is None:
        raise ValueError(
            "this tokenizer has no padding token, and texts of a batch are padded together: set one, for example "
            "adapter.processor.pad_token = adapter.processor.eos_token"
        )
    pairs = isinstance(samples[0], (tuple, list))
    texts = [list(part) for part in zip(*samples, strict=True)] if pairs else [list(samples)]
    options: dict[str, Any] = {"padding": True, "return_tensors": "pt"}
    inputs: Mapping[str, Tensor] = tokenizer(*texts, **options)
    limit = interface.max_tokens
    if limit is not None and inputs["input_ids"].shape[1] > limit:
        long = int((inputs[MASK].sum(1) > limit).sum())
        warnings.warn(
            f"{long} of {len(samples)} texts are longer than the {limit} tokens that the model takes and were cut",
            stacklevel=3,
        )
        inputs = tokenizer(*texts, truncation=True, max_length=limit, **options)
    return {n: v for n, v in inputs.items() if n in interface.content or n in interface.arguments}


def _stack(samples: Sequence[Any], processor: Any) -> Tensor:
    tensors = []
    for sample in samples:
        if isinstance(sample, Tensor):
            tensors.append(sample)
        elif processor is not None:
            tensors.append(processor(sample))
        elif hasattr(sample, "__array__") and not hasattr(sample, "convert"):
            tensors.append(torch.as_tensor(sample))
        else:
            raise ValueError(
                f"this model has no processor for a sample of type {type(sample).__name__}: pass processor=, a "
                "function from one sample to one tensor, to hf_stitch.load, or give tensors"
            )
    if len({t.shape for t in tensors}) > 1:
        raise ValueError(f"samples of one batch must have one shape, got {sorted({tuple(t.shape) for t in tensors})}")
    return torch.stack(tensors)
