"""Conversion of raw samples into the inputs of a model, for adapters and stitched models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from hf_stitch.adapters.cutting.interface import DECODER, MASK, POSITIONS, PROMPT, Interface, positions_of
from hf_stitch.adapters.cutting.surgery import alone
from hf_stitch.data.samples import RawSamples, ids_of, missing_in
from hf_stitch.hub import DownloadOptions, explained, refused
from hf_stitch.printing import visible, warn

OFFSETS = "offset_mapping"
"""Key of the character spans of tokens."""

PROCESSORS = {"input_ids": ("tokenizer.json", "tokenizer_config.json"), "pixel_values": ("preprocessor_config.json",)}
"""Main input of a model -> files of its processor on the Hub; at least one of them exists."""


class Deferred(partial[Any]):
    """Factory of a processor, called with the first samples: it imports modelling code that a CNN does not require."""


def preprocess(
    samples: Sequence[Any], processor: Any, interface: Interface, model: nn.Module, *, offsets: bool = False
) -> dict[str, Tensor]:
    """Convert raw samples into the inputs of a model, on its device and in its dtype.

    Texts are padded to the longest text of the batch: on the side of the tokenizer if padding there leaves activations
    unchanged, otherwise on the opposite side; on the right if texts are grouped by length. With padding on the left,
    the model receives position ids if it accepts them. Texts over the token limit of the model are truncated, with a
    warning and their number. The decoder of an encoder-decoder model receives the texts of the encoder, shifted one
    token to the right, like the decoder inputs that transformers derives from inputs (Bart) or labels.

    Images of any mode are converted to grey or RGB for an image processor: 16-bit grey values are scaled to 8 bit, and
    transparent images are put on white. A function receives each sample unchanged, also a text.

    The result contains the keyword arguments of the forward. ``offsets`` adds ``offset_mapping``, which is not an
    argument of the model: shape (batch, tokens, 2), the start and end (exclusive) of each token in characters; 0 for
    special tokens and padding.
    """
    if not len(samples):
        raise ValueError("samples must contain at least one sample, got none")
    ids = ids_of(samples)
    for id_, sample in zip(ids, samples, strict=True):
        if (missing := missing_in(sample, "")) is not None:
            raise ValueError(f"sample {id_!r} is missing (None{missing and f', its {missing}'}): remove it")
    if isinstance(samples[0], dict) and interface.modality in samples[0]:  # select the field of the modality
        samples = RawSamples([sample[interface.modality] for sample in samples], ids)
    device, dtype = place_of(model)
    tokenizes = interface.modality == "text" and (processor is None or hasattr(processor, "pad_token"))
    if tokenizes and not isinstance(samples[0], Tensor):
        inputs = _tokenize(samples, processor, interface, offsets)
    elif offsets:
        raise ValueError(
            "character offsets require texts and a fast tokenizer of transformers, got samples of type "
            f"{type(samples[0]).__name__} and the processor {type(processor).__name__}: set offsets=False"
        )
    elif hasattr(processor, "save_pretrained") and not isinstance(samples[0], Tensor):
        (name,) = interface.content
        images = converted(samples, interface.shapes[name][0])
        inputs = {name: processor(images=images, return_tensors="pt")["pixel_values"]}
    else:
        inputs = _stack(samples, processor, interface)
    if POSITIONS in interface.arguments and MASK in inputs and not bool(inputs[MASK][:, 0].all()):
        inputs = {POSITIONS: positions_of(inputs[MASK]), **inputs}
    if interface.modality == "image":
        (pixels,) = inputs.values()
        finite = pixels.isfinite().flatten(1).all(1)
        if not bool(finite.all()):
            bad_id = ids[int(finite.int().argmin())]
            raise ValueError(f"image {bad_id!r} contains NaN or infinite values: remove it, or check its processor")
    return {n: v.to(device, dtype if v.is_floating_point() else v.dtype) for n, v in inputs.items()}


def place_of(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype of the inputs of a model, taken from its first parameter.

    Offloaded weights are on the meta device. The device is then taken from the first parameter on another device, or
    from the execution device of an accelerate hook.
    """
    with alone(model):
        dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
        devices = (p.device for p in model.parameters() if not p.is_meta)
        hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
        by_hooks = (getattr(hook, "execution_device", None) for hook in hooks)
        return torch.device(next(devices, next((d for d in by_hooks if d is not None), "cpu"))), dtype


def _tokenize(samples: Sequence[Any], tokenizer: Any, interface: Interface, offsets: bool) -> dict[str, Tensor]:
    if tokenizer is None:
        raise ValueError(
            "this model does not have a tokenizer: pass processor= to hf_stitch.load, or save one in its folder"
        )
    if tokenizer.pad_token is None:
        raise ValueError(
            "batches of texts require a tokenizer with a padding token: set tokenizer.pad_token = tokenizer.eos_token "
            "and pass the tokenizer as processor= to hf_stitch.load"
        )
    if offsets and not tokenizer.is_fast:
        raise ValueError(
            f"character offsets require a fast tokenizer, got the slow {type(tokenizer).__name__}; pass a fast one as "
            "processor= to hf_stitch.load"
        )
    pairs = isinstance(samples[0], (tuple, list))
    texts = [list(part) for part in zip(*samples, strict=True)] if pairs else [list(samples)]
    texts[0] = [interface.prefix + text for text in texts[0]] if interface.prefix else texts[0]
    options: dict[str, Any] = {
        "padding": True,
        "return_tensors": "pt",
        "return_attention_mask": True,
        "return_offsets_mapping": offsets,
    }
    inputs: Mapping[str, Tensor] = tokenizer(*texts, **options)
    for id_, tokens in zip(ids_of(samples), inputs[MASK].sum(1).tolist(), strict=True):
        if not tokens:
            raise ValueError(
                f"text {id_!r} must contain at least one token: remove it, or pass a tokenizer with special "
                "tokens as processor= to hf_stitch.load"
            )
    limit = interface.max_tokens
    if limit is not None and inputs["input_ids"].shape[1] > limit:
        num_long = int((inputs[MASK].sum(1) > limit).sum())
        warn(f"{num_long} of {len(samples)} texts are longer than the {limit} tokens of the model and are truncated")
        inputs = tokenizer(*texts, truncation=True, max_length=limit, **options)
    if len(interface.sides) < 2:  # padding_side= of the call would be saved with the tokenizer
        order = inputs[MASK].argsort(dim=1, descending=interface.sides != ("left",), stable=True)
        inputs = {name: value[torch.arange(len(order))[:, None], order] for name, value in inputs.items()}
    if DECODER + "input_ids" in (*interface.content, *interface.given):
        inputs = {**inputs, **decoder_inputs(inputs, interface)}
    if OFFSETS in inputs:  # offsets in the text; tokens of the prefix have none, like special tokens
        inputs = {**inputs, OFFSETS: (inputs[OFFSETS] - len(interface.prefix)).clamp(min=0)}
    inputs = {**inputs, PROMPT: interface.prompted(inputs[MASK])}
    accepted = {*interface.content, *interface.given, *interface.arguments, *([OFFSETS] if offsets else [])}
    return {n: v for n, v in inputs.items() if n in accepted}


def decoder_inputs(inputs: Mapping[str, Tensor], interface: Interface) -> dict[str, Tensor]:
    """Return the inputs of the decoder: the start token, then all tokens of the encoder except the last."""
    if interface.start_id is None:
        raise ValueError(
            "the first token of the decoder is unknown because the config defines neither decoder_start_token_id nor "
            "bos_token_id: set model.config.decoder_start_token_id before hf_stitch.load, or pass inputs with "
            "decoder_input_ids"
        )
    start_values = {"input_ids": interface.start_id, MASK: 1}
    shifted = {
        DECODER + name: torch.cat([torch.full_like(inputs[name][:, :1], value), inputs[name][:, :-1]], 1)
        for name, value in start_values.items()
    }
    if OFFSETS in inputs and interface.content[0].startswith(DECODER):
        spans = inputs[OFFSETS]
        shifted[OFFSETS] = torch.cat([torch.zeros_like(spans[:, :1]), spans[:, :-1]], 1)
    return shifted


def _stack(samples: Sequence[Any], processor: Any, interface: Interface) -> dict[str, Tensor]:
    """Stack tensors, arrays, or the outputs of a function on each sample; texts may have several tensors."""
    content, is_text, rows = interface.content[0], interface.modality == "text", list[Mapping[str, Any]]()
    for id_, sample in zip(ids_of(samples), samples, strict=True):
        subject, required = f"sample {id_!r}", [content]
        if isinstance(sample, Tensor):
            output = sample
        elif processor is not None:
            try:
                output = processor(sample)
            except Exception as error:
                raise ValueError(f"processor= on {subject} raised {type(error).__name__}: {error}") from error
            subject = f"the output of processor= for {subject}"
            required += [name for name in interface.arguments if name == interface.mask]
        elif hasattr(sample, "__array__") and not hasattr(sample, "convert"):
            output = torch.as_tensor(sample)
        else:
            raise ValueError(
                f"samples of type {type(sample).__name__} require a processor: pass processor=, a function from one "
                "sample to one tensor, to hf_stitch.load, or pass tensors"
            )
        rows.append(output if is_text and isinstance(output, Mapping) else {content: output})
        for value in rows[-1].values():
            _check_sample(value, subject, (0,) if is_text else interface.shapes.get(content))
            expected = interface.dtypes.get(content, "float32")
            if value.is_complex() and "complex" not in expected:
                raise ValueError(
                    f"{subject} must have the dtype {expected}, got {value.dtype}: pass the real and imaginary "
                    "parts as channels"
                )
        if not set(required) <= rows[-1].keys():
            raise ValueError(
                f"{subject} must be a dict of tensors with the keys {', '.join(required)}, got "
                f"{', '.join(rows[-1]) or 'none'}"
            )
    shapes = {tuple(value.shape) for row in rows for value in row.values()}
    if len(shapes) > 1:
        raise ValueError(f"samples of one batch must have one shape, got {sorted(shapes)}: resize or pad them")
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _check_sample(value: Any, subject: str, native: tuple[int, ...] | None) -> None:
    """Check that a preprocessed sample is a tensor with as many axes as a sample of the example inputs."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{subject} must be a tensor, got {type(value).__name__}: use torch.as_tensor"
            + (", with the channels first" if native is None or len(native) > 1 else "")
        )
    if native is not None and value.dim() != len(native):
        batched = value.dim() == len(native) + 1 and len(value) == 1
        raise ValueError(
            f"{subject} must be a tensor with {len(native)} {'axes' if len(native) > 1 else 'axis'}"
            f"{f', like {native}' if all(native) else ''}, got the shape {tuple(value.shape)}"
            f"{': remove the batch axis (tensor[0])' if batched else ''}"
        )


def load_processor(origin: str, main_input: str, hub: Mapping[str, Any]) -> Any:
    """Load the tokenizer or image processor that is saved with a model.

    ``None``, with a warning, if it does not exist or the Hub is not available; ``None`` without a warning for models of
    neither texts nor images.
    """
    import transformers

    if main_input not in ("input_ids", "pixel_values"):
        return None
    kind = transformers.AutoTokenizer if main_input == "input_ids" else transformers.AutoImageProcessor
    cause: Exception | None = None
    try:
        processor = kind.from_pretrained(origin, **hub)
        if main_input != "input_ids" or len(processor.get_vocab()) > len(processor.all_special_tokens):
            return processor
        reason = "its vocabulary is empty"  # returned by transformers if a file is missing
    except (OSError, ValueError, KeyError) as error:  # raised for a repository without a processor
        cause, reason = error, str(error).strip().splitlines()[0]
    if not Path(origin).is_dir():  # transformers treats a file to which the Hub denies access as missing
        download: Any = {key: hub[key] for key in DownloadOptions.__annotations__ if key in hub}
        failure = f"the processor of {origin} could not be loaded"
        refusal = (cause and explained(failure, cause)) or refused(failure, origin, PROCESSORS[main_input], **download)
        if isinstance(refusal, PermissionError):
            raise refusal from cause
        if isinstance(refusal, ConnectionError):  # the model may be in the cache without a processor
            reason = f"none in the cache; {refusal}"
    warn(
        f"{origin} does not contain a usable {kind.__name__[4:]} ({visible(reason)}): pass processor= to "
        "hf_stitch.load to use raw samples"
    )
    return None


UNBOUNDED = ("I", "F")
"""Modes with an unknown range of values."""


def converted(images: Sequence[Any], channels: int) -> list[Any]:
    """Convert PIL images to the mode that a network requires.

    16-bit grey values are scaled by their range: 65535 becomes 255, for any largest value in the image. Transparent
    images are put on white, with one warning per process. All other modes are converted by Pillow.
    """
    mode = "L" if channels == 1 else "RGB"
    for id_, image in zip(ids_of(images), images, strict=True):
        dtype = getattr(image, "dtype", None)
        if getattr(dtype, "kind", "f") not in "biuf" or getattr(dtype, "is_complex", False):
            raise ValueError(f"image {id_!r} must have real numbers, got the dtype {dtype}: convert it to bytes")
        description = ""
        if isinstance(image, Image.Image) and image.mode in UNBOUNDED:
            description = f"mode {image.mode!r}"
        elif isinstance(image, np.ndarray) and image.dtype.kind in "iu" and image.size and image.max() > 255:
            description = f"integers up to {image.max()}"
        if description:
            raise ValueError(
                f"the range of values of image {id_!r} ({description}) is unknown: convert it to bytes, for example "
                "Image.fromarray((np.asarray(image) / highest * 255).astype('uint8')), where highest is the largest "
                "possible value of a pixel"
            )
    return [_on_white(image).convert(mode) if isinstance(image, Image.Image) else image for image in images]


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    if not image.has_transparency_data:
        return image
    layers = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    if layers.getchannel("A").getextrema() == (255, 255):
        return layers.convert("RGB")
    _warn_of_transparency()
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), layers).convert("RGB")


@cache
def _warn_of_transparency() -> None:
    warn("transparent images are put on white; to use another background, convert them first")
