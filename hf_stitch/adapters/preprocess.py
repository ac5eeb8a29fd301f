"""Turn raw samples into the inputs of a model, for adapters and stitched models."""

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
"""Main input of a model -> files of its processor on the Hub, of which one at least is there."""


class Deferred(partial[Any]):
    """Makes a processor when samples are there: that takes the modelling code of transformers, which a CNN lacks."""


def preprocess(
    samples: Sequence[Any], processor: Any, interface: Interface, model: nn.Module, *, offsets: bool = False
) -> dict[str, Tensor]:
    """Turn raw samples into the inputs of a model, on its device and in its dtype.

    Texts are padded to the longest of the batch: on the side of the tokenizer, unless only padding on the other one
    changes no activation, and on the right if texts run by length. Beside padding on the left, the model gets the
    positions of the tokens if it takes them. Texts over the token limit of the model are truncated, with a warning that
    counts them. The decoder of an encoder-decoder receives the texts of the encoder, shifted one token to the right, as
    transformers derives decoder inputs from inputs (Bart) or from labels.

    Images of any mode are converted to grey or RGB before an image processor gets them: 16-bit grey values are scaled
    to 8 bit, and transparent images are put on white. A function gets each sample as it is, also a text.

    Returns the keyword arguments of the forward. With ``offsets`` also ``offset_mapping``, which is not an argument of
    the model: shape (batch, tokens, 2), the first character of each token and the one after its last; both are 0 for
    special tokens and padding.
    """
    if not len(samples):
        raise ValueError("there are no samples to preprocess")
    ids = ids_of(samples)
    for id_, sample in zip(ids, samples, strict=True):
        if (missing := missing_in(sample, "")) is not None:
            raise ValueError(f"sample {id_!r} is missing (None{missing and f', its {missing}'}): leave it out")
    if isinstance(samples[0], dict) and interface.modality in samples[0]:  # of several fields, the own one
        samples = RawSamples([sample[interface.modality] for sample in samples], ids)
    device, dtype = place_of(model)
    tokenizes = interface.modality == "text" and (processor is None or hasattr(processor, "pad_token"))
    if tokenizes and not isinstance(samples[0], Tensor):
        inputs = _tokenize(samples, processor, interface, offsets)
    elif offsets:
        raise ValueError(
            "only texts that a fast tokenizer of transformers reads have character offsets, got samples of type "
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
            bad = ids[int(finite.int().argmin())]
            raise ValueError(f"image {bad!r} has values that are NaN or infinite: leave it out, or check its processor")
    return {n: v.to(device, dtype if v.is_floating_point() else v.dtype) for n, v in inputs.items()}


def place_of(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype in which a model takes its input: those of its first parameter.

    If weights are offloaded, they are on the meta device. Then the device is that of the first parameter elsewhere, or
    the execution device of an accelerate hook.
    """
    with alone(model):
        dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
        devices = (p.device for p in model.parameters() if not p.is_meta)
        hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
        runs_on = (getattr(hook, "execution_device", None) for hook in hooks)
        return torch.device(next(devices, next((place for place in runs_on if place is not None), "cpu"))), dtype


def _tokenize(samples: Sequence[Any], tokenizer: Any, interface: Interface, offsets: bool) -> dict[str, Tensor]:
    if tokenizer is None:
        raise ValueError(
            "this model has no tokenizer: pass processor= to hf_stitch.load, or save one in the folder of the model"
        )
    if tokenizer.pad_token is None:
        raise ValueError(
            "this tokenizer has no padding token, which batches of texts require: set one "
            "(tokenizer.pad_token = tokenizer.eos_token) and pass the tokenizer as processor= to hf_stitch.load"
        )
    if offsets and not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which cannot return character offsets; pass a fast "
            "tokenizer as processor= to hf_stitch.load"
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
                f"text {id_!r} has no tokens: leave it out, or pass a tokenizer that adds special tokens as processor= "
                "to hf_stitch.load"
            )
    limit = interface.max_tokens
    if limit is not None and inputs["input_ids"].shape[1] > limit:
        long = int((inputs[MASK].sum(1) > limit).sum())
        warn(f"{long} of {len(samples)} texts are longer than the {limit} tokens of the model and are truncated")
        inputs = tokenizer(*texts, truncation=True, max_length=limit, **options)
    if len(interface.sides) < 2:  # padding_side= of the call would be saved with the tokenizer
        order = inputs[MASK].argsort(dim=1, descending=interface.sides != ("left",), stable=True)
        inputs = {name: value[torch.arange(len(order))[:, None], order] for name, value in inputs.items()}
    if DECODER + "input_ids" in (*interface.content, *interface.given):
        inputs = {**inputs, **decoder_inputs(inputs, interface)}
    if OFFSETS in inputs:  # of the text: tokens of the prefix have none, as special tokens
        inputs = {**inputs, OFFSETS: (inputs[OFFSETS] - len(interface.prefix)).clamp(min=0)}
    inputs = {**inputs, PROMPT: interface.prompted(inputs[MASK])}
    wanted = {*interface.content, *interface.given, *interface.arguments, *([OFFSETS] if offsets else [])}
    return {n: v for n, v in inputs.items() if n in wanted}


def decoder_inputs(inputs: Mapping[str, Tensor], interface: Interface) -> dict[str, Tensor]:
    """Return the inputs of the decoder: the start token, then all tokens of the encoder but the last."""
    if interface.start_id is None:
        raise ValueError(
            "the config defines neither decoder_start_token_id nor bos_token_id, so the first token of the decoder is "
            "unknown: set model.config.decoder_start_token_id before hf_stitch.load, or pass inputs that contain "
            "decoder_input_ids"
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


def _stack(samples: Sequence[Any], processor: Any, interface: Interface) -> dict[str, Tensor]:
    """Stack samples that are tensors or arrays, or what a function makes of each; of texts also several tensors."""
    content, is_text, rows = interface.content[0], interface.modality == "text", list[Mapping[str, Any]]()
    for id_, sample in zip(ids_of(samples), samples, strict=True):
        what, needed = f"sample {id_!r}", [content]
        if isinstance(sample, Tensor):
            made = sample
        elif processor is not None:
            what = f"the processor= of {what}"
            try:
                made = processor(sample)
            except Exception as error:
                raise ValueError(f"{what} raised {type(error).__name__}: {error}") from error
            needed += [name for name in interface.arguments if name == interface.mask]
        elif hasattr(sample, "__array__") and not hasattr(sample, "convert"):
            made = torch.as_tensor(sample)
        else:
            raise ValueError(
                f"this model has no processor for samples of type {type(sample).__name__}: pass processor=, a "
                "function from one sample to one tensor, to hf_stitch.load, or pass tensors"
            )
        rows.append(made if is_text and isinstance(made, Mapping) else {content: made})
        for value in rows[-1].values():
            _check_sample(value, what, (0,) if is_text else interface.shapes.get(content))
            expected = interface.dtypes.get(content, "float32")
            if value.is_complex() and "complex" not in expected:
                raise ValueError(
                    f"{what} has complex numbers ({value.dtype}), and {expected} is expected: pass their real and "
                    "imaginary parts as channels"
                )
        if not set(needed) <= rows[-1].keys():
            raise ValueError(
                f"{what} gives {', '.join(rows[-1]) or 'nothing'}, and the network takes {', '.join(needed)}: return a "
                f"dict of {' and '.join(needed)}, one tensor each"
            )
    shapes = {tuple(value.shape) for row in rows for value in row.values()}
    if len(shapes) > 1:
        raise ValueError(f"samples of one batch must have one shape, got {sorted(shapes)}: resize or pad them")
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _check_sample(value: Any, what: str, native: tuple[int, ...] | None) -> None:
    """Check that a preprocessed sample is one tensor with as many axes as a sample of the example inputs."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{what} gives {type(value).__name__}, and one tensor is expected: return torch.as_tensor(values)"
            + (", with the channels first" if native is None or len(native) > 1 else "")
        )
    if native is not None and value.dim() != len(native):
        batched = value.dim() == len(native) + 1 and len(value) == 1
        raise ValueError(
            f"{what} gives a tensor of the shape {tuple(value.shape)}, and one of {len(native)} "
            f"{'axes' if len(native) > 1 else 'axis'} is expected{f', as {native}' if all(native) else ''}"
            f"{': leave out the batch axis (tensor[0])' if batched else ''}"
        )


def load_processor(place: str, main_input: str, hub: Mapping[str, Any]) -> Any:
    """Load the tokenizer or image processor that is saved with a model.

    Returns the processor. ``None``, with a warning that gives the reason, if there is none or the Hub is not available;
    ``None`` without a warning for models that take neither texts nor images.
    """
    import transformers

    if main_input not in ("input_ids", "pixel_values"):
        return None
    kind = transformers.AutoTokenizer if main_input == "input_ids" else transformers.AutoImageProcessor
    cause: Exception | None = None
    try:
        found = kind.from_pretrained(place, **hub)
        if main_input != "input_ids" or len(found.get_vocab()) > len(found.all_special_tokens):
            return found
        reason = "its vocabulary is empty"  # the result of transformers if a file is missing
    except (OSError, ValueError, KeyError) as error:  # raised for a repository without a processor
        cause, reason = error, str(error).strip().splitlines()[0]
    if not Path(place).is_dir():  # transformers takes a file that the Hub refuses for missing
        access: Any = {key: hub[key] for key in DownloadOptions.__annotations__ if key in hub}
        failure = f"the processor of {place} could not be loaded"
        refusal = (cause and explained(failure, cause)) or refused(failure, place, PROCESSORS[main_input], **access)
        if isinstance(refusal, PermissionError):
            raise refusal from cause
        if isinstance(refusal, ConnectionError):  # the model may be in the cache and need no processor
            reason = f"none in the cache; {refusal}"
    warn(
        f"{place} has no {kind.__name__[4:]} ({visible(reason)}): pass processor= to hf_stitch.load to use raw samples"
    )
    return None


UNBOUNDED = ("I", "F")
"""Modes whose range of values is unknown."""


def converted(images: Sequence[Any], channels: int) -> list[Any]:
    """Convert PIL images to the mode that a network takes.

    16-bit grey values are scaled by their range: 65535 becomes 255, whatever the largest value in the image.
    Transparent images are put on white, with one warning per process. All other modes are converted as Pillow does.
    """
    mode = "L" if channels == 1 else "RGB"
    for id_, image in zip(ids_of(images), images, strict=True):
        dtype = getattr(image, "dtype", None)
        if getattr(dtype, "kind", "f") not in "biuf" or getattr(dtype, "is_complex", False):
            raise ValueError(f"image {id_!r} has {dtype} values, and those of an image are real: convert it to bytes")
        what = ""
        if isinstance(image, Image.Image) and image.mode in UNBOUNDED:
            what = f"mode {image.mode!r}"
        elif isinstance(image, np.ndarray) and image.dtype.kind in "iu" and image.size and image.max() > 255:
            what = f"integers up to {image.max()}"
        if what:
            raise ValueError(
                f"image {id_!r} has {what}, whose range is unknown: scale it to bytes yourself, for example "
                "Image.fromarray((np.asarray(image) / highest * 255).astype('uint8')), where highest is the largest "
                "value that a pixel can have"
            )
    return [_opaque(image).convert(mode) if isinstance(image, Image.Image) else image for image in images]


def _opaque(image: Image.Image) -> Image.Image:
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
    warn("some images are transparent and are put on white: put them on another background yourself if it matters")
