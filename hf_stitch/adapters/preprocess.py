"""From raw samples to a model's inputs: one way for adapters and stitched models."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch.adapters.cutting.interface import DECODER, MASK, Interface

OFFSETS = "offset_mapping"


def preprocess(
    samples: Sequence[Any], processor: Any, interface: Interface, model: nn.Module, *, offsets: bool = False
) -> dict[str, Tensor]:
    """Raw samples as the inputs of a model, on its device and in its dtype.

    Args:
        samples: Texts (or pairs of texts), images, arrays or tensors. Tensors are taken as preprocessed.
        processor: A tokenizer or image processor of transformers, or a function from one sample to one tensor;
            ``None`` for tensors.
        interface: How the model takes its input.
        model: The model (or a part of it) that the inputs are for.
        offsets: Whether to say, beside the inputs, which characters of its text each token stands for.

    Returns:
        The keyword arguments of its forward. Texts are padded together; those over the model's limit are cut, with a
        warning that counts them. The decoder of an encoder-decoder reads the same texts as the encoder, each token one
        place later, as transformers makes them where none are given (Bart) or of labels. With ``offsets`` also
        ``offset_mapping``, which is no argument of the model: (batch, tokens, 2), the first character and the one after
        the last; both 0 for special tokens and padding.

    Raises:
        ValueError: If there are no samples, no processor for their kind, they do not stack, offsets are asked of
            what is no text or of a tokenizer that does not know them, or it is unknown what a decoder begins with.
    """
    if not len(samples):
        raise ValueError("there are no samples to preprocess")
    device, dtype = place_of(model)
    if interface.modality == "text" and not isinstance(samples[0], Tensor):
        inputs = _tokenize(samples, processor, interface, offsets)
    elif offsets:
        raise ValueError(f"only texts have character offsets, got samples of type {type(samples[0]).__name__}")
    elif hasattr(processor, "save_pretrained") and not isinstance(samples[0], Tensor):
        (name,) = interface.content
        mode = "L" if interface.shapes[name][0] == 1 else "RGB"
        images = [s.convert(mode) if hasattr(s, "convert") else s for s in samples]
        inputs = {name: processor(images=images, return_tensors="pt")["pixel_values"]}
    else:
        inputs = {interface.content[0]: _stack(samples, processor)}
    return {n: v.to(device, dtype if v.is_floating_point() else v.dtype) for n, v in inputs.items()}


def place_of(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where a model takes its input, and in which dtype: those of its first parameter.

    Weights that are offloaded are on the meta device; then it is the first that is not, or else where they are run.
    """
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    devices = (p.device for p in model.parameters() if not p.is_meta)
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    runs_on = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next(devices, next((place for place in runs_on if place is not None), "cpu"))), dtype


def _tokenize(samples: Sequence[Any], tokenizer: Any, interface: Interface, offsets: bool) -> dict[str, Tensor]:
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: pass processor= to hf_stitch.load, or save one beside the model")
    if tokenizer.pad_token is None:
        raise ValueError(
            "this tokenizer has no padding token, and texts of a batch are padded together: set one, for example "
            "adapter.processor.pad_token = adapter.processor.eos_token"
        )
    if offsets and not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which does not know the characters that a token stands "
            "for; pass a fast one as processor= to hf_stitch.load"
        )
    pairs = isinstance(samples[0], (tuple, list))
    texts = [list(part) for part in zip(*samples, strict=True)] if pairs else [list(samples)]
    options: dict[str, Any] = {"padding": True, "return_tensors": "pt", "return_offsets_mapping": offsets}
    inputs: Mapping[str, Tensor] = tokenizer(*texts, **options)
    limit = interface.max_tokens
    if limit is not None and inputs["input_ids"].shape[1] > limit:
        long = int((inputs[MASK].sum(1) > limit).sum())
        warnings.warn(
            f"{long} of {len(samples)} texts are longer than the {limit} tokens that the model takes and were cut",
            stacklevel=3,
        )
        inputs = tokenizer(*texts, truncation=True, max_length=limit, **options)
    if DECODER + "input_ids" in (*interface.content, *interface.given):
        inputs = {**inputs, **_decoder_inputs(inputs, interface)}
    wanted = {*interface.content, *interface.given, *interface.arguments, *([OFFSETS] if offsets else [])}
    return {n: v for n, v in inputs.items() if n in wanted}


def _decoder_inputs(inputs: Mapping[str, Tensor], interface: Interface) -> dict[str, Tensor]:
    """What a decoder reads of the text that the encoder reads: the start, and all tokens but the last."""
    if interface.start_id is None:
        raise ValueError(
            "the config names neither decoder_start_token_id nor bos_token_id, so that it is unknown what the text of "
            "the decoder begins with: set model.config.decoder_start_token_id before hf_stitch.load, or give inputs "
            "with decoder_input_ids of your own"
        )
    first = {"input_ids": interface.start_id, MASK: 1}
    later = {
        DECODER + name: torch.cat([torch.full_like(inputs[name][:, :1], value), inputs[name][:, :-1]], 1)
        for name, value in first.items()
    }
    if OFFSETS in inputs and interface.content[0].startswith(DECODER):
        spans = inputs[OFFSETS]
        later[OFFSETS] = torch.cat([torch.zeros_like(spans[:, :1]), spans[:, :-1]], 1)
    return later


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


def load_processor(place: str, main_input: str, hub: Mapping[str, Any]) -> Any:
    """The tokenizer or image processor saved beside a model.

    Args:
        place: Hub id or local folder.
        main_input: ``input_ids`` for a tokenizer, ``pixel_values`` for an image processor.
        hub: Loading options.

    Returns:
        ``None``, with a warning that says why, where there is none; without one for models that take neither text nor
        images.
    """
    import transformers

    if main_input not in ("input_ids", "pixel_values"):
        return None
    kind = transformers.AutoTokenizer if main_input == "input_ids" else transformers.AutoImageProcessor
    try:
        found = kind.from_pretrained(place, **hub)
        if main_input != "input_ids" or len(found.get_vocab()) > len(found.all_special_tokens):
            return found
        reason = "its vocabulary is empty"  # what transformers makes of a missing file
    except (OSError, ValueError, KeyError) as error:  # what transformers raises for a repository without one
        reason = str(error).strip().splitlines()[0]
    warnings.warn(f"{place} has no {kind.__name__[4:]} ({reason}): raw samples will need processor=", stacklevel=4)
    return None
