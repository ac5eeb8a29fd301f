"""Library of transformers networks for images or sound with text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.adapters.cutting.interface import MASK
from hf_stitch.adapters.examples import ExampleError, named
from hf_stitch.adapters.libraries.base import Described, Loaded
from hf_stitch.adapters.libraries.configs import pad_id
from hf_stitch.adapters.libraries.transformers import Transformers, _interface, _max_tokens
from hf_stitch.adapters.overrides import override_of
from hf_stitch.adapters.preprocess import place_of
from hf_stitch.adapters.untrusted import sealed
from hf_stitch.reference import ModelReference
from hf_stitch_towers.adapter import ImageTextAdapter
from hf_stitch_towers.examples import (
    MEDIA,
    PLACEHOLDERS,
    TEXTS,
    end_of,
    example_of,
    grids_of,
    media_of,
    placeholder,
    texts_of,
)
from hf_stitch_towers.inputs import ImageAndTextProcessor
from hf_stitch_towers.outputs import TRANSDUCERS

__all__ = ["ImageText"]

TASK = "image-text-to-text"
OF_TEXTS = ("text-generation", "text-classification", "fill-mask", "text-encoding")
"""Tasks of text networks: for them, a multimodal checkpoint is loaded as a text network."""

MASKS = (MASK, "token_type_ids", "mm_token_type_ids", "decoder_attention_mask")
"""Arguments with one value per token, such as masks."""


class ImageText(Transformers):
    """Library of transformers networks that accept images (sound, video) and a text.

    ``content`` is the input that enters at the cuts: ``"image"`` (the default), ``"audio"``, ``"video"``, or ``"text"``
    for a network of text only. The second input is the context and belongs to each sample.

    Example:
        >>> from transformers import CLIPModel, ViTConfig
        >>> ImageText().serves(torch.nn.Linear(2, 2))
        False
    """

    name: ClassVar[str] = "image-text"
    adapter_class: ClassVar[type[Adapter]] = ImageTextAdapter

    def serves(self, model: Any) -> bool:
        """Return whether the forward of a ``PreTrainedModel`` accepts images, sound or video, and tokens."""
        if not super().serves(model) or getattr(model.config, "model_type", None) == "hf_stitch":
            return False
        return bool(media_of(model) and texts_of(model))

    def reads(self, config: Mapping[str, Any]) -> bool:
        """Return whether the first architecture of a config accepts both."""
        import transformers

        (name,) = (config.get("architectures") or [""])[:1]
        model_class = getattr(transformers, name, None) if name and config.get("model_type") != "hf_stitch" else None
        with suppress(ImportError):  # a class that requires a missing library
            return isinstance(model_class, type) and bool(media_of(model_class) and texts_of(model_class))
        return False

    def load(self, reference: ModelReference, processor: Any = None, **options: Any) -> Loaded:
        """Load a network with the processor of both inputs; for a text task, as a text network."""
        if reference.task in OF_TEXTS:
            loaded = super().load(reference, processor, **options)
            return loaded._replace(reference=dataclasses.replace(loaded.reference, library=Transformers.name))
        keys = ("trust_remote_code", "token", "cache_dir", "local_files_only", "subfolder")
        hub_options = {name: options[name] for name in keys if name in options}
        loaded_processor = processor or _processor_of(
            str(reference.id), {**hub_options, "revision": reference.revision}
        )
        loaded = super().load(reference, loaded_processor, **options)
        if not self.serves(loaded.model):
            return loaded._replace(reference=dataclasses.replace(loaded.reference, library=Transformers.name))
        return loaded

    def adapter(
        self,
        model: Any,
        reference: ModelReference,
        example_inputs: Any = None,
        processor: Any = None,
        content: str | None = None,
    ) -> Adapter:
        """Create the adapter for both inputs or, as for any text network, for text only."""
        if content is None and _of_texts(example_inputs, processor):
            content = "text"
        described = self.describe(model, example_inputs, processor, content)
        adapter_class = self.adapter_class if described.interface.content[0] not in TEXTS else Adapter
        return adapter_class(
            described.model, self, described.interface, described.example, reference, described.processor
        )

    def describe(
        self, model: Any, example_inputs: Any = None, processor: Any = None, content: str | None = None
    ) -> Described:
        """Describe a network by its config and its forward; the content is the image by default.

        Example inputs are built from the sizes in nested configs and the number of vectors of an image.

        Raises:
            ExampleError: If ``content`` is not an input of the network, or example inputs cannot be built from its
                config.
        """
        name = content_of(model, content)
        if name in TEXTS:
            return self._of_text(model, example_inputs, processor, name)
        override = override_of(model)
        if example_inputs is not None:
            example = named(model, example_inputs, override.options, name)
        else:
            example = dict(override.example(model) or example_of(model, name))
        if not isinstance(example.get(name), Tensor):
            raise ExampleError(f"example_inputs of {type(model).__name__} must contain a tensor {name!r}", model)
        example = _placed(example, model)
        texts = tuple(argument for argument in TEXTS if isinstance(example.get(argument), Tensor))
        placeholder_ids = [placeholder(model, kind) for kind in PLACEHOLDERS]
        interface = dataclasses.replace(
            _interface(model, name, example, processor),
            special_ids=tuple(sorted({id_ for id_ in placeholder_ids if id_ is not None})),
            modality="image" if MEDIA[name] == "image" else "tensor",
            given=texts,
            beside=next(iter(texts), None),
            pad_id=pad_id(model.config),
            arguments=tuple(argument for argument in MASKS if argument in example),
            max_tokens=_max_tokens(model, model.config, None) if texts else None,
            grids=grids_of(model, example),
            **_packed(example, name, texts),
        )
        outputs = _outputs(model, {**interface.options, **override.options, **example}, MEDIA[name])
        return Described(model, dataclasses.replace(interface, outputs=outputs), example, processor)

    def _of_text(self, model: Any, example_inputs: Any, processor: Any, name: str) -> Described:
        """Describe a network for text: without images, or with required images in the context."""
        tokenizer = getattr(processor, "tokenizer", processor)
        mark = placeholder(model, MEDIA[media_of(model)[0]])
        if example_inputs is None and mark is None:  # two towers, or an encoder, may require an image
            described = super().describe(model, None, tokenizer, name)
            if not _runs(model, {**described.interface.options, **described.example}):
                example_inputs = example_of(model, media_of(model)[0])
        described = super().describe(model, example_inputs, tokenizer, name)
        outputs = _outputs(model, {**described.interface.options, **described.example}, "text")
        special = {*described.interface.special_ids, *([] if (end := end_of(model)) is None else [end])}
        interface = dataclasses.replace(described.interface, outputs=outputs, special_ids=tuple(sorted(special)))
        return described._replace(interface=interface)

    def task(self, adapter: Adapter) -> str | None:
        """The task: ``image-text-to-text`` for decoders with images, else the task as for transformers."""
        if adapter.interface.content[0] in TEXTS or adapter.interface.outputs != ("logits",):
            return super().task(adapter) if adapter.interface.content[0] in TEXTS else None
        generates = hasattr(adapter.model, "generate") and adapter.model.can_generate()  # type: ignore[operator]
        return TASK if generates and not type(adapter.model).__name__.endswith(TRANSDUCERS) else None

    def unscored(self, adapter: Adapter) -> str:
        """Description of the head's predictions; empty if a task scores them."""
        return "" if self.task(adapter) else super().unscored(adapter)

    def processor_of(self, blueprint: Mapping[str, Any], folder: str) -> Any:
        """Load the processor saved in a folder."""
        with sealed():
            return _processor_of(folder, {"trust_remote_code": False, "local_files_only": True})


def content_of(model: Any, content: str | None) -> str:
    """Return the argument of the content, from its name or its kind."""
    arguments = (*media_of(model), *texts_of(model))
    if content is None:
        return arguments[0]
    for name in arguments:
        if content in (name, MEDIA.get(name, "text")):
            return name
    kinds = sorted({MEDIA.get(name, "text") for name in arguments})
    raise ExampleError(
        f"content must be {' or '.join(map(repr, kinds))}, or an argument of {type(model).__name__} "
        f"({', '.join(arguments)}), got {content!r}",
        model,
    )


def _of_texts(example_inputs: Any, processor: Any) -> bool:
    """Return whether inputs or a processor are for text only."""
    if isinstance(example_inputs, Mapping):
        return not any(name in MEDIA for name in example_inputs)
    if isinstance(example_inputs, Tensor):
        return not example_inputs.is_floating_point()
    return example_inputs is None and hasattr(processor, "get_vocab") and not hasattr(processor, "image_processor")


def _placed(example: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    device, dtype = place_of(model)
    return {
        name: x.to(device, dtype if x.is_floating_point() else x.dtype) if isinstance(x, Tensor) else x
        for name, x in example.items()
    }


def _packed(example: Mapping[str, Any], name: str, texts: tuple[str, ...]) -> dict[str, Any]:
    """Return the interface fields for a content with several rows per sample on its first axis."""
    content = example[name]
    batch_size = len(example[texts[0]]) if texts else len(content)
    if len(content) == batch_size or not batch_size or len(content) % batch_size:
        return {}
    return {"packed": (name,), "shapes": {name: (len(content) // batch_size, *content.shape[1:])}}


def _outputs(model: nn.Module, inputs: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    """Return the main outputs of a network: logits, the embedding of the content, or the last hidden state."""
    output: Any = None
    with suppress(Exception), torch.no_grad(), evaluating(model):  # the survey reports errors
        output = model(**inputs)
    if not isinstance(output, Mapping):
        return ()
    names = ("logits", f"{kind}_embeds", "last_hidden_state")
    return next(((name,) for name in names if isinstance(output.get(name), Tensor)), ())


def _runs(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    try:
        with torch.no_grad(), evaluating(model):
            model(**inputs)
    except Exception:  # the code of the network can raise anything
        return False
    return True


def _processor_of(path: str, hub_options: Mapping[str, Any]) -> Any:
    """Load the processor of a network, or its image processor with its tokenizer; ``None`` without a processor."""
    import transformers

    with suppress(Exception):  # a repository without a processor, or a missing library
        processor = transformers.AutoProcessor.from_pretrained(path, **hub_options)
        if hasattr(processor, "tokenizer"):
            return processor
    with suppress(Exception):
        image_processor = transformers.AutoImageProcessor.from_pretrained(path, **hub_options)
        return ImageAndTextProcessor(image_processor, transformers.AutoTokenizer.from_pretrained(path, **hub_options))
    return None
