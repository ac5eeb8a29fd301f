"""Convert raw samples, such as an image with a text, to the inputs of a multimodal network."""

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
"""Values of ``Cut.padding`` where the positions of the cut are text tokens."""

WHOLE = ("pixel_attention_mask",)
"""Arguments that are all ones for whole images: omitting them changes nothing for images without padding."""

SAMPLE_KEY = {"pixel_values": "image", "flattened_patches": "image", "pixel_values_videos": "video"}
"""Argument of a network -> key of its content in raw samples; ``audio`` for arguments not listed."""


@dataclasses.dataclass(frozen=True)
class ImageAndTextProcessor:
    """Image processor and tokenizer together, for networks without a joint processor.

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
        """Return the inputs for images, for texts, or for both."""
        inputs: dict[str, Any] = {}
        if images is not None:
            flat = [image for group in images for image in (group if isinstance(group, list) else [group])]
            inputs = {**self.image_processor(images=flat, return_tensors="pt")}
        return inputs if text is None else {**inputs, **self.tokenizer(text, **options)}

    def save_pretrained(self, folder: Any, **options: Any) -> None:
        """Save both to a folder as a transformers processor."""
        self.processor.save_pretrained(folder, **options)

    @property
    def processor(self) -> Any:
        """Both as a transformers processor, for pipelines."""
        from transformers import VisionTextDualEncoderProcessor  # accepts images or texts only

        return VisionTextDualEncoderProcessor(self.image_processor, self.tokenizer)


@dataclasses.dataclass(frozen=True)
class WaveformProcessor:
    """Feature extractor for single waveforms, for an audio tower.

    Attributes:
        extractor: The feature extractor.
        content: Name of its output.
    """

    extractor: Any
    content: str

    def __call__(self, wave: Any) -> Tensor:
        """Return the features of a waveform."""
        options = {"sampling_rate": self.extractor.sampling_rate, "return_tensors": "pt"}
        features: Tensor = self.extractor(np.asarray(wave, dtype=np.float32), **options)[self.content][0]
        return features


@dataclasses.dataclass(frozen=True)
class _Row:
    """One sample: its id, its images or sound, and its text, or ``None``."""

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
    """Convert samples to the inputs of a network for images (sound) with text, on its device and in its dtype.

    Args:
        samples: Images, lists of images, tensors, or dictionaries with ``image`` (or the name of the content) and
            ``text``.
        processor: A transformers processor, an :class:`ImageAndTextProcessor`, or a function from a sample to a tensor
            or to a dict of arguments; ``None`` for tensors.
        interface: Input interface of the network.
        model: The network.
        prompt: Text of samples without a text. Default: the prompt of the interface.
        placeholder: Id of the image placeholder token.
        accepts: Names of the arguments of the forward.

    Returns:
        The keyword arguments of the forward.

    Raises:
        ValueError: If ``samples`` is empty, a sample lacks an image or a text (optional if a decoder begins the text),
            a text lacks the placeholder tokens of its images or is too long for the network, or pixels are NaN or
            infinite. The message names the sample.

    Example:
        >>> interface = Interface(("pixel_values",), "image", {"pixel_values": (1, 2, 2)}, {"pixel_values": "float32"},
        ...                       given=("input_ids",), prompt={"input_ids": [5, 6]})
        >>> inputs = inputs_of([torch.ones(1, 2, 2)] * 3, None, interface, nn.Linear(1, 1))
        >>> inputs["pixel_values"].shape, inputs["input_ids"].tolist()
        (torch.Size([3, 1, 2, 2]), [[5, 6], [5, 6], [5, 6]])
    """
    if not len(samples):
        raise ValueError("preprocess requires at least one sample")
    rows = [_row(sample, id_, interface) for id_, sample in zip(ids_of(samples), samples, strict=True)]
    is_transformers = hasattr(processor, "save_pretrained")
    if is_transformers and MEDIA.get(interface.content[0]) == "audio":
        inputs = _from_sound(rows, processor, interface, prompt)
    elif all(isinstance(row.content, Tensor) for row in rows) and not is_transformers:
        inputs = _stacked(rows, interface)
    elif is_transformers:
        inputs = _processed(rows, processor, interface, prompt)
    elif processor is not None:
        inputs = _called(rows, samples, processor, interface)
    else:
        raise ValueError(
            f"{type(model).__name__} requires a processor for samples of type {type(samples[0]).__name__}: pass it "
            "(AutoProcessor) as processor= to hf_stitch.load, or pass tensors"
        )
    inputs = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    for name, token_ids in interface.prompt.items():
        if name not in inputs:
            inputs[name] = torch.tensor([token_ids] * len(rows))
    if "decoder_input_ids" in interface.given and "decoder_input_ids" not in inputs:
        inputs = with_decoder_input(inputs, len(rows), interface.given, start_of(model))
    for name in interface.given:
        if name not in inputs:
            example_context = '"Describe the image"' if is_transformers else f'{{"{name}": […]}}'
            raise ValueError(
                f"{type(model).__name__} requires {name} with images, but sample {rows[0].id!r} lacks a text: load it "
                f"with hf_stitch.load(…, context={example_context}) for all images, or pass samples with a text, "
                '{"image": …, "text": …}'
            )
    _check(inputs, rows, interface, model, placeholder)
    accepted = {*interface.content, *interface.given, *interface.prompt, *interface.arguments, *accepts}
    device, dtype = place_of(model)
    return {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype)
        for name, value in inputs.items()
        if name in accepted
    }


def with_decoder_input(
    inputs: Mapping[str, Any], count: int, text_names: Sequence[str], first: int | None
) -> dict[str, Any]:
    """Return inputs with the decoder input: its first token, then the text unless it is the input of an encoder."""
    extended = dict(inputs)
    decoder_only = "input_ids" not in text_names
    text, mask = (extended.pop(name, None) if decoder_only else None for name in ("input_ids", MASK))
    if text is not None and mask is None:
        mask = torch.ones_like(text)
    if first is not None and (text is None or not text.shape[1] or bool((text[:, :1] != first).any())):
        begin = torch.full((count, 1), first)
        text = begin if text is None else torch.cat([begin.to(text), text], 1)
        mask = None if mask is None else torch.cat([torch.ones_like(mask[:, :1]), mask], 1)
    if text is not None:
        extended["decoder_input_ids"] = text
    if mask is not None and not bool(mask.all()):
        extended[mask_of("decoder_input_ids")] = mask
    return extended


def _row(sample: Any, id_: Id, interface: Interface) -> _Row:
    """Split a sample into its image and its text."""
    if (missing := missing_in(sample, "image")) is not None:
        raise ValueError(f"sample {id_!r} lacks its {missing} (None): omit this sample")
    if isinstance(sample, str):
        raise ValueError(
            f"{interface.content[0]} requires an image, but sample {id_!r} is a text: name the image column"
        )
    if not isinstance(sample, Mapping):
        return _Row(id_, sample, None)
    names = (SAMPLE_KEY.get(interface.content[0], "audio"), interface.content[0])
    name = next((candidate for candidate in names if candidate in sample), None)
    if name is None:
        raise ValueError(
            f"sample {id_!r} must contain {names[0]}, got {', '.join(map(str, sample)) or 'nothing'}: pass "
            f'{{"{names[0]}": …, "text": …}}'
        )
    return _Row(id_, sample[name], sample.get("text"))


def _stacked(rows: Sequence[_Row], interface: Interface) -> dict[str, Tensor]:
    shapes = {tuple(row.content.shape) for row in rows}
    if len(shapes) > 1:
        raise ValueError(f"samples of a batch must have the same shape, got {sorted(shapes)}: resize or pad them")
    if texts := [row for row in rows if row.text is not None]:
        raise ValueError(
            f"the text of sample {texts[0].id!r} requires a processor: pass the processor of the network "
            "(AutoProcessor) as processor= to hf_stitch.load"
        )
    name = interface.content[0]
    stack = torch.cat if name in interface.packed else torch.stack
    return {name: stack([row.content for row in rows])}


def _called(rows: Sequence[_Row], samples: Sequence[Any], processor: Any, interface: Interface) -> dict[str, Any]:
    """Return the stacked outputs of a function of samples."""
    outputs = []
    for row, sample in zip(rows, samples, strict=True):
        try:
            prepared = processor(sample)
        except Exception as error:
            raise ValueError(f"processor= raised {type(error).__name__} for sample {row.id!r}: {error}") from error
        outputs.append(prepared if isinstance(prepared, Mapping) else {interface.content[0]: prepared})
        if not all(isinstance(value, Tensor) for value in outputs[-1].values()):
            raise ValueError(f"processor= must return tensors, got {type(prepared).__name__} for sample {row.id!r}")
    shapes = {name: {tuple(output[name].shape) for output in outputs if name in output} for name in outputs[0]}
    if wrong := [
        name for name, prepared in shapes.items() if len(prepared) > 1 or any(name not in output for output in outputs)
    ]:
        raise ValueError(
            f"processor= must return {wrong[0]} of one shape, got {sorted(shapes[wrong[0]])}: pad or resize"
        )
    return {
        name: (torch.cat if name in interface.packed else torch.stack)([output[name] for output in outputs])
        for name in outputs[0]
    }


def _processed(rows: Sequence[_Row], processor: Any, interface: Interface, prompt: str | None) -> dict[str, Any]:
    """Return the outputs of a transformers processor for images and texts."""
    channels = interface.shapes[interface.content[0]][-3] if len(interface.shapes[interface.content[0]]) >= 3 else 3
    images = [list(row.content) if isinstance(row.content, (list, tuple)) else [row.content] for row in rows]
    images = [
        converted(RawSamples(sample_images, [row.id] * len(sample_images)), channels)
        for sample_images, row in zip(images, rows, strict=True)
    ]
    texts = [prompt if row.text is None else row.text for row in rows]
    if lacking := [row for row, text in zip(rows, texts, strict=True) if text is None]:
        if any(text is not None for text in texts):
            raise ValueError(
                f"sample {lacking[0].id!r} lacks a text, unlike other samples: pass texts for all samples, or for none"
            )
        return dict(_images_only(processor, images))
    full = [
        _with_placeholders(str(text), len(sample_images), processor)
        for text, sample_images in zip(texts, images, strict=True)
    ]
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is not None and tokenizer.pad_token is None:
        raise ValueError(
            "batches of texts require a padding token, which this tokenizer lacks: set "
            "processor.tokenizer.pad_token = processor.tokenizer.eos_token"
        )
    try:
        return dict(processor(images=images, text=full, padding=True, return_tensors="pt"))
    except Exception as error:
        problem = error
        if all(len(sample_images) == 1 for sample_images in images):  # some accept one image per text, without a list
            try:
                flat = [image for [image] in images]
                return dict(processor(images=flat, text=full, padding=True, return_tensors="pt"))
            except Exception as flat_error:
                problem = flat_error
        raise ValueError(
            f"{type(processor).__name__} does not accept the samples {rows[0].id!r} to {rows[-1].id!r} "
            f"({type(problem).__name__}: {problem})"
        ) from problem


def _from_sound(rows: Sequence[_Row], processor: Any, interface: Interface, prompt: str | None) -> dict[str, Any]:
    """Return the outputs of a transformers processor for waveforms, and for texts if it accepts both."""
    extractor = getattr(processor, "feature_extractor", processor)
    waves, shape = [np.asarray(row.content, dtype=np.float32) for row in rows], interface.shapes[interface.content[0]]
    if wrong := [row for row, wave in zip(rows, waves, strict=True) if wave.ndim != 1]:
        if all(wave.shape == tuple(shape) for wave in waves):  # already features
            return _stacked(rows, interface)
        raise ValueError(f"sample {wrong[0].id!r} must be a waveform of one channel: pass one-dimensional arrays")
    texts: list[Any] = [prompt if row.text is None else row.text for row in rows]
    options = {"sampling_rate": extractor.sampling_rate, "return_tensors": "pt"}
    tokenizer = getattr(processor, "tokenizer", None)
    if "input_ids" not in interface.given and tokenizer is not None and not any(text is None for text in texts):
        decoder_text = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")  # decoder input
        return {**extractor(waves, **options), **decoder_text}
    if "input_ids" not in interface.given or any(text is None for text in texts):
        return dict(extractor(waves, **options))
    return dict(processor(audio=waves, text=texts, padding=True, **options))


def _images_only(processor: Any, images: Sequence[Sequence[Any]]) -> Mapping[str, Any]:
    image_processor = getattr(processor, "image_processor", processor)
    flat = [image for sample_images in images for image in sample_images]
    outputs: Mapping[str, Any] = image_processor(images=flat, return_tensors="pt")
    return outputs


def _with_placeholders(text: str, images: int, processor: Any) -> str:
    """Return a text with the placeholder tokens of its images: unchanged, from the chat template, or in front."""
    token = getattr(processor, "image_token", None)
    token = token if isinstance(token, str) else getattr(token, "content", None)
    if token is not None and token in text:
        return text
    if getattr(processor, "chat_template", None):
        content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]
        templated: str = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        return templated
    return f"{token * images} {text}".strip() if token is not None and _needs_placeholders(processor) else text


def _needs_placeholders(processor: Any) -> bool:
    """Return whether a processor requires image placeholder tokens in the text (PaliGemma and BLIP add them)."""
    return type(processor).__name__ not in ("PaliGemmaProcessor", "Blip2Processor", "InstructBlipProcessor")


def _owners(inputs: Mapping[str, Tensor], rows: Sequence[_Row], interface: Interface) -> list[Id]:
    """Return the id of the sample of each row of the content; an empty list if the ids are unknown."""
    name, ids = interface.content[0], [row.id for row in rows]
    count, grid = len(inputs[name]), inputs.get("image_grid_thw")  # the number of patches of each image in Qwen-VL
    if count == len(ids):
        return ids
    several = [row.content if isinstance(row.content, (list, tuple)) else [row.content] for row in rows]
    images = [id_ for id_, sample_images in zip(ids, several, strict=True) for _ in sample_images]
    if grid is not None and len(grid) == len(images) and int(grid.prod(1).sum()) == count:
        return [id_ for id_, patches in zip(images, grid.prod(1).tolist(), strict=True) for _ in range(patches)]
    if count == len(images):
        return images
    fixed = interface.shapes[name][0] if name in interface.packed and grid is None else 0
    return [id_ for id_ in ids for _ in range(fixed)] if count == fixed * len(ids) else []


def _check(
    inputs: Mapping[str, Tensor], rows: Sequence[_Row], interface: Interface, model: nn.Module, placeholder: int | None
) -> None:
    """Check that pixels are finite, and that texts contain image placeholder tokens and are not too long."""
    name = interface.content[0]
    if name not in inputs:
        raise ValueError(f"the processor must return {name}, got {', '.join(inputs) or 'nothing'}")
    finite = inputs[name].reshape(len(inputs[name]), -1).isfinite().all(1)
    if not bool(finite.all()):
        owners = _owners(inputs, rows, interface)
        label = repr(owners[int(finite.int().argmin())]) if owners else f"among {rows[0].id!r} to {rows[-1].id!r}"
        raise ValueError(f"image {label} contains values that are NaN or infinite: omit it, or check its processor")
    ids = inputs.get("input_ids")
    if ids is None:
        return
    if placeholder is not None:
        counts = (ids == placeholder).sum(1)
        if bool((counts == 0).any()):
            bad = rows[int(counts.argmin())].id
            raise ValueError(
                f"the text of sample {bad!r} lacks the image placeholder token (id {placeholder}) of "
                f"{type(model).__name__}: add the image token to the text, or set a chat template of the processor"
            )
    lengths = (
        inputs[MASK].sum(1) if MASK in inputs and inputs[MASK].dim() == 2 else torch.full((len(ids),), ids.shape[1])
    )
    if interface.max_tokens is not None and bool((lengths > interface.max_tokens).any()):
        bad = rows[int(lengths.argmax())].id
        raise ValueError(
            f"sample {bad!r} has {int(lengths.max())} tokens, images included, but {type(model).__name__} accepts at "
            f"most {interface.max_tokens}: shorten the text or use fewer images (truncation could remove image tokens)"
        )
