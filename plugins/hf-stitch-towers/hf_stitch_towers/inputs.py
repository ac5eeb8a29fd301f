"""Turn samples of images and texts into the inputs of a network that reads both."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_stitch.adapters.cutting.interface import MASK, Interface, mask_of
from hf_stitch.adapters.preprocess import converted, place_of
from hf_stitch.data.samples import Id, RawSamples, ids_of, missing_in
from hf_stitch_towers.examples import MEDIA, start_of

__all__ = ["ImageAndTextProcessor", "inputs_of"]

OF_TEXT = ("masked", "behind")
"""How cuts are padded whose positions are those of the text."""

WHOLE = ("pixel_attention_mask",)
"""Arguments that are all ones for whole images, which is also what a network takes without them."""

KIND = {"pixel_values": "image", "flattened_patches": "image", "pixel_values_videos": "video"}


@dataclasses.dataclass(frozen=True)
class ImageAndTextProcessor:
    """An image processor and a tokenizer side by side, for networks without a processor of their own.

    Attributes:
        image_processor: The image processor.
        tokenizer: The tokenizer.

    Example:
        >>> from transformers import ViTImageProcessor
        >>> both = ImageAndTextProcessor(ViTImageProcessor(), tokenizer=None)
        >>> both.image_processor.size["height"]
        224
    """

    image_processor: Any
    tokenizer: Any

    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> dict[str, Any]:
        """Return what both make of images and texts."""
        flat = [one for each in images for one in (each if isinstance(each, list) else [each])]
        texts = self.tokenizer(text, **options) if text is not None else {}
        return {**self.image_processor(images=flat, return_tensors="pt"), **texts}

    def save_pretrained(self, folder: Any, **options: Any) -> None:
        """Save both to a folder, as a processor of transformers."""
        self.processor.save_pretrained(folder, **options)

    @property
    def processor(self) -> Any:
        """Both as a processor of transformers, for pipelines."""
        from transformers import VisionTextDualEncoderProcessor  # which makes inputs of images and of texts alone

        return VisionTextDualEncoderProcessor(self.image_processor, self.tokenizer)


@dataclasses.dataclass(frozen=True)
class Hearing:
    """A feature extractor for one waveform after another, for a tower that reads sound alone.

    Attributes:
        extractor: The feature extractor.
        content: Name of what it makes.
    """

    extractor: Any
    content: str

    def __call__(self, wave: Any) -> Tensor:
        """Return the features of a waveform."""
        options = {"sampling_rate": self.extractor.sampling_rate, "return_tensors": "pt"}
        found: Tensor = self.extractor(np.asarray(wave, dtype=np.float32), **options)[self.content][0]
        return found


@dataclasses.dataclass(frozen=True)
class _Row:
    """One sample: its images, its text if it has one, and whether it is a tensor that needs no processor."""

    id: Id
    content: Any
    text: Any


def inputs_of(
    samples: Sequence[Any],
    processor: Any,
    interface: Interface,
    model: nn.Module,
    prompt: str | None = None,
    *,
    placeholder: int | None = None,
    accepts: Sequence[str] = (),
) -> dict[str, Tensor]:
    """Turn samples into the inputs of a network that reads images (sound) with a text, on its device and in its dtype.

    Args:
        samples: Images, lists of images, tensors, or dictionaries with ``image`` (or the name of the content) and
            ``text``.
        processor: A processor of transformers, an :class:`ImageAndTextProcessor`, or a function from a sample to a
            tensor or to a dict of arguments; ``None`` for tensors.
        interface: How the network takes its input.
        model: The network.
        prompt: Text of samples that have none. Default: the prompt of the interface.
        placeholder: Id of the token that stands for an image.
        accepts: Names of the arguments of the forward.

    Returns:
        The keyword arguments of the forward.

    Raises:
        ValueError: If there are no samples, a sample has no image or no text (a text that a decoder begins can be
            missing), a text lacks the placeholders of its images or has more tokens than the network takes, or pixels
            are NaN or infinite. The message names the sample.

    Example:
        >>> interface = Interface(("pixel_values",), "image", {"pixel_values": (1, 2, 2)}, {"pixel_values": "float32"},
        ...                       given=("input_ids",), prompt={"input_ids": [5, 6]})
        >>> made = inputs_of([torch.ones(1, 2, 2)] * 3, None, interface, nn.Linear(1, 1))
        >>> made["pixel_values"].shape, made["input_ids"].tolist()
        (torch.Size([3, 1, 2, 2]), [[5, 6], [5, 6], [5, 6]])
    """
    if not len(samples):
        raise ValueError("there are no samples to preprocess")
    rows = [_row(sample, id_, interface) for id_, sample in zip(ids_of(samples), samples, strict=True)]
    if hasattr(processor, "save_pretrained") and MEDIA.get(interface.content[0]) == "audio":
        made = _heard(rows, processor, interface, prompt)
    elif all(isinstance(row.content, Tensor) for row in rows) and not hasattr(processor, "save_pretrained"):
        made = _stacked(rows, interface)
    elif hasattr(processor, "save_pretrained"):
        made = _processed(rows, processor, interface, prompt)
    elif processor is not None:
        made = _called(rows, samples, processor, interface)
    else:
        raise ValueError(
            f"{type(model).__name__} has no processor for samples of type {type(samples[0]).__name__}: pass its "
            "processor (AutoProcessor) as processor= to hf_stitch.load, or pass tensors"
        )
    made = {name: value for name, value in made.items() if isinstance(value, Tensor)}
    for name, row in interface.prompt.items():
        if name not in made:
            made[name] = torch.tensor([row] * len(rows))
    if "decoder_input_ids" in interface.given and "decoder_input_ids" not in made:
        made = begun(made, len(rows), interface.given, start_of(model))
    for name in interface.given:
        if name not in made:
            given = '"Describe the image"' if hasattr(processor, "save_pretrained") else f'{{"{name}": […]}}'
            raise ValueError(
                f"sample {rows[0].id!r} has no text, and {type(model).__name__} reads {name} beside images: load it "
                f"with one for all images, hf_stitch.load(…, context={given}), or give each sample its own, "
                '{"image": …, "text": …}'
            )
    _check(made, rows, interface, model, placeholder)
    known = {*interface.content, *interface.given, *interface.prompt, *interface.arguments, *accepts}
    device, dtype = place_of(model)
    return {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype)
        for name, value in made.items()
        if name in known
    }


def begun(made: Mapping[str, Any], count: int, given: Sequence[str], first: int | None) -> dict[str, Any]:
    """Return inputs with what a decoder continues: its first token, and the text unless an encoder reads it."""
    found = dict(made)
    own = "input_ids" not in given
    text, mask = (found.pop(name, None) if own else None for name in ("input_ids", MASK))
    if text is not None and mask is None:
        mask = torch.ones_like(text)
    if first is not None and (text is None or not text.shape[1] or bool((text[:, :1] != first).any())):
        begin = torch.full((count, 1), first)
        text = begin if text is None else torch.cat([begin.to(text), text], 1)
        mask = None if mask is None else torch.cat([torch.ones_like(mask[:, :1]), mask], 1)
    if text is not None:
        found["decoder_input_ids"] = text
    if mask is not None and not bool(mask.all()):
        found[mask_of("decoder_input_ids")] = mask
    return found


def _row(sample: Any, id_: Id, interface: Interface) -> _Row:
    """Divide a sample into its image and its text."""
    if (missing := missing_in(sample, "image")) is not None:
        raise ValueError(f"sample {id_!r} has no {missing} (None): leave it out")
    if isinstance(sample, str):
        raise ValueError(
            f"sample {id_!r} is a text, and {interface.content[0]} is to be read: name the column of images"
        )
    if not isinstance(sample, Mapping):
        return _Row(id_, sample, None)
    names = (KIND.get(interface.content[0], "audio"), interface.content[0])
    name = next((each for each in names if each in sample), None)
    if name is None:
        raise ValueError(
            f"sample {id_!r} has no {names[0]}, but {', '.join(map(str, sample)) or 'nothing'}: give it one, "
            f'{{"{names[0]}": …, "text": …}}'
        )
    return _Row(id_, sample[name], sample.get("text"))


def _stacked(rows: Sequence[_Row], interface: Interface) -> dict[str, Tensor]:
    shapes = {tuple(row.content.shape) for row in rows}
    if len(shapes) > 1:
        raise ValueError(f"samples of one batch must have one shape, got {sorted(shapes)}: resize or pad them")
    if texts := [row for row in rows if row.text is not None]:
        raise ValueError(
            f"sample {texts[0].id!r} has a text beside a tensor, and no processor reads it: pass the processor of the "
            "network (AutoProcessor) as processor= to hf_stitch.load"
        )
    name = interface.content[0]
    stack = torch.cat if name in interface.packed else torch.stack
    return {name: stack([row.content for row in rows])}


def _called(rows: Sequence[_Row], samples: Sequence[Any], processor: Any, interface: Interface) -> dict[str, Any]:
    """Return what a function makes of each sample, stacked."""
    made = []
    for row, sample in zip(rows, samples, strict=True):
        try:
            found = processor(sample)
        except Exception as error:
            raise ValueError(f"the processor= of sample {row.id!r} raised {type(error).__name__}: {error}") from error
        made.append(found if isinstance(found, Mapping) else {interface.content[0]: found})
        if not all(isinstance(value, Tensor) for value in made[-1].values()):
            raise ValueError(f"the processor= of sample {row.id!r} gives {type(found).__name__}, expected tensors")
    shapes = {name: {tuple(each[name].shape) for each in made if name in each} for name in made[0]}
    if wrong := [name for name, found in shapes.items() if len(found) > 1 or any(name not in each for each in made)]:
        raise ValueError(
            f"the processor= makes {wrong[0]} of several shapes, {sorted(shapes[wrong[0]])}: pad or resize to one"
        )
    return {
        name: (torch.cat if name in interface.packed else torch.stack)([each[name] for each in made])
        for name in made[0]
    }


def _processed(rows: Sequence[_Row], processor: Any, interface: Interface, prompt: str | None) -> dict[str, Any]:
    """Return what a processor of transformers makes of images and texts."""
    channels = interface.shapes[interface.content[0]][-3] if len(interface.shapes[interface.content[0]]) >= 3 else 3
    images = [list(row.content) if isinstance(row.content, (list, tuple)) else [row.content] for row in rows]
    images = [converted(RawSamples(own, [row.id] * len(own)), channels) for own, row in zip(images, rows, strict=True)]
    texts = [prompt if row.text is None else row.text for row in rows]
    if lacking := [row for row, text in zip(rows, texts, strict=True) if text is None]:
        if any(text is not None for text in texts):
            raise ValueError(f"sample {lacking[0].id!r} has no text, and others have: give all of them one, or none")
        return dict(_images_only(processor, images))
    full = [_with_placeholders(str(text), len(own), processor) for text, own in zip(texts, images, strict=True)]
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is not None and tokenizer.pad_token is None:
        raise ValueError(
            "this tokenizer has no padding token, which batches of texts require: set one "
            "(processor.tokenizer.pad_token = processor.tokenizer.eos_token)"
        )
    try:
        return dict(processor(images=images, text=full, padding=True, return_tensors="pt"))
    except Exception:
        if all(len(own) == 1 for own in images):  # some take one image for each text, without a list
            try:
                return dict(processor(images=[own[0] for own in images], text=full, padding=True, return_tensors="pt"))
            except Exception as other:
                error = other
        raise ValueError(
            f"{type(processor).__name__} does not take the samples {rows[0].id!r} to {rows[-1].id!r} "
            f"({type(error).__name__}: {error})"
        ) from error


def _heard(rows: Sequence[_Row], processor: Any, interface: Interface, prompt: str | None) -> dict[str, Any]:
    """Return what a processor of transformers makes of waveforms, and of texts if it reads them beside."""
    part = getattr(processor, "feature_extractor", processor)
    waves, shape = [np.asarray(row.content, dtype=np.float32) for row in rows], interface.shapes[interface.content[0]]
    if wrong := [row for row, wave in zip(rows, waves, strict=True) if wave.ndim != 1]:
        if all(wave.shape == tuple(shape) for wave in waves):  # which are features already
            return _stacked(rows, interface)
        raise ValueError(f"sample {wrong[0].id!r} is no waveform of one channel: pass arrays of one axis")
    texts: list[Any] = [prompt if row.text is None else row.text for row in rows]
    options = {"sampling_rate": part.sampling_rate, "return_tensors": "pt"}
    tokenizer = getattr(processor, "tokenizer", None)
    if "input_ids" not in interface.given and tokenizer is not None and not any(text is None for text in texts):
        told = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")  # what a decoder continues
        return {**part(waves, **options), **told}
    if "input_ids" not in interface.given or any(text is None for text in texts):
        return dict(part(waves, **options))
    return dict(processor(audio=waves, text=texts, padding=True, **options))


def _images_only(processor: Any, images: Sequence[Sequence[Any]]) -> Mapping[str, Any]:
    part = getattr(processor, "image_processor", processor)
    found: Mapping[str, Any] = part(images=[one for own in images for one in own], return_tensors="pt")
    return found


def _with_placeholders(text: str, images: int, processor: Any) -> str:
    """Return a text with the marks of its images: those it has, those of the chat template, or before the text."""
    token = getattr(processor, "image_token", None)
    token = token if isinstance(token, str) else getattr(token, "content", None)
    if token is not None and token in text:
        return text
    if getattr(processor, "chat_template", None):
        content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]
        found: str = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        return found
    return f"{token * images} {text}".strip() if token is not None and _expands(processor) else text


def _expands(processor: Any) -> bool:
    """Return whether a processor wants the marks of images in the text (PaliGemma and BLIP add them themselves)."""
    return type(processor).__name__ not in ("PaliGemmaProcessor", "Blip2Processor", "InstructBlipProcessor")


def _check(
    made: Mapping[str, Tensor], rows: Sequence[_Row], interface: Interface, model: nn.Module, placeholder: int | None
) -> None:
    """Check that pixels are finite, texts have marks of their images, and are not too long."""
    name = interface.content[0]
    if name not in made:
        raise ValueError(f"the processor gives {', '.join(made) or 'nothing'}, and {name} is needed")
    value = made[name]
    per_sample = value.reshape(len(rows), -1) if not len(value) % len(rows) else value.flatten(1)
    finite = per_sample.isfinite().all(1)
    if not bool(finite.all()):
        bad = rows[min(int(finite.int().argmin()), len(rows) - 1)].id
        raise ValueError(f"image {bad!r} has values that are NaN or infinite: leave it out, or check its processor")
    ids = made.get("input_ids")
    if ids is None:
        return
    if placeholder is not None:
        counts = (ids == placeholder).sum(1)
        if bool((counts == 0).any()):
            bad = rows[int(counts.argmin())].id
            raise ValueError(
                f"the text of sample {bad!r} has no token for its image (id {placeholder}), so that "
                f"{type(model).__name__} would not read the image: write the mark of an image into the text, or give "
                "the processor a chat template"
            )
    lengths = made[MASK].sum(1) if MASK in made and made[MASK].dim() == 2 else torch.full((len(ids),), ids.shape[1])
    if interface.max_tokens is not None and bool((lengths > interface.max_tokens).any()):
        bad = rows[int(lengths.argmax())].id
        raise ValueError(
            f"sample {bad!r} has {int(lengths.max())} tokens with those of its images, and {type(model).__name__} "
            f"takes {interface.max_tokens}: truncation could cut tokens of the image, so shorten the text or use fewer "
            "images"
        )
