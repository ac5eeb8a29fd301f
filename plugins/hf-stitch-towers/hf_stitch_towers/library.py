"""The library of networks of transformers that read images or sound together with texts."""

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
"""Tasks that load a network for texts alone."""

MASKS = (MASK, "token_type_ids", "mm_token_type_ids", "decoder_attention_mask")


class ImageText(Transformers):
    """Networks of transformers whose forward takes images (sound, video) and a text.

    ``content`` names what enters at the cuts: ``"image"`` (the default; ``"audio"``, ``"video"``), or ``"text"`` for
    the network of texts alone. The other input is the context, which each sample carries with it.

    Example:
        >>> from transformers import CLIPModel, ViTConfig
        >>> ImageText().serves(torch.nn.Linear(2, 2))
        False
    """

    name: ClassVar[str] = "image-text"
    adapter_class: ClassVar[type[Adapter]] = ImageTextAdapter

    def serves(self, model: Any) -> bool:
        """Return whether the forward of a ``PreTrainedModel`` takes images, sound or video and tokens."""
        if not super().serves(model) or getattr(model.config, "model_type", None) == "hf_stitch":
            return False
        return bool(media_of(model) and texts_of(model))

    def reads(self, config: Mapping[str, Any]) -> bool:
        """Return whether the first class that a config names takes both."""
        import transformers

        (name,) = (config.get("architectures") or [""])[:1]
        kind = getattr(transformers, name, None) if name and config.get("model_type") != "hf_stitch" else None
        with suppress(ImportError):  # a class that needs a library which is not there
            return isinstance(kind, type) and bool(media_of(kind) and texts_of(kind))
        return False

    def load(self, reference: ModelReference, processor: Any = None, **options: Any) -> Loaded:
        """Load a network with the processor of both inputs; for a task of texts alone, as one of texts."""
        if reference.task in OF_TEXTS:
            found = super().load(reference, processor, **options)
            return found._replace(reference=dataclasses.replace(found.reference, library=Transformers.name))
        keys = ("trust_remote_code", "token", "cache_dir", "local_files_only", "subfolder")
        hub = {name: options[name] for name in keys if name in options}
        kept = processor or _processor_of(str(reference.id), {**hub, "revision": reference.revision})
        found = super().load(reference, kept, **options)
        if not self.serves(found.model):
            return found._replace(reference=dataclasses.replace(found.reference, library=Transformers.name))
        return found

    def adapter(
        self,
        model: Any,
        reference: ModelReference,
        example_inputs: Any = None,
        processor: Any = None,
        content: str | None = None,
    ) -> Adapter:
        """Create the adapter: of both inputs, or of texts alone as for any network of texts."""
        if content is None and _of_texts(example_inputs, processor):
            content = "text"
        found = self.describe(model, example_inputs, processor, content)
        kind = self.adapter_class if found.interface.content[0] not in TEXTS else Adapter
        return kind(found.model, self, found.interface, found.example, reference, found.processor)

    def describe(
        self, model: Any, example_inputs: Any = None, processor: Any = None, content: str | None = None
    ) -> Described:
        """Describe a network by its config and its forward, with images as the content unless ``content`` is a text.

        An example is found from the sizes in nested configs and the number of vectors of an image.

        Raises:
            ExampleError: If ``content`` is no input of the network, or no valid example follows from its config.
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
        given = tuple(each for each in TEXTS if isinstance(example.get(each), Tensor))
        marks = [placeholder(model, kind) for kind in PLACEHOLDERS]
        interface = dataclasses.replace(
            _interface(model, name, example, processor),
            special_ids=tuple(sorted({mark for mark in marks if mark is not None})),
            modality="image" if MEDIA[name] == "image" else "tensor",
            given=given,
            beside=next(iter(given), None),
            pad_id=pad_id(model.config),
            arguments=tuple(each for each in MASKS if each in example),
            max_tokens=_max_tokens(model, model.config, None) if given else None,
            grids=grids_of(model, example),
            **_packed(example, name, given),
        )
        outputs = _outputs(model, {**interface.options, **override.options, **example}, MEDIA[name])
        return Described(model, dataclasses.replace(interface, outputs=outputs), example, processor)

    def _of_text(self, model: Any, example_inputs: Any, processor: Any, name: str) -> Described:
        """Describe a network for texts: alone, or with the images that its forward needs in the context."""
        tokenizer = getattr(processor, "tokenizer", processor)
        mark = placeholder(model, MEDIA[media_of(model)[0]])
        if example_inputs is None and mark is None:  # it may need an image: two towers, or one of the encoder
            found = super().describe(model, None, tokenizer, name)
            if not _runs(model, {**found.interface.options, **found.example}):
                example_inputs = example_of(model, media_of(model)[0])
        found = super().describe(model, example_inputs, tokenizer, name)
        outputs = _outputs(model, {**found.interface.options, **found.example}, "text")
        special = {*found.interface.special_ids, *([] if (end := end_of(model)) is None else [end])}
        interface = dataclasses.replace(found.interface, outputs=outputs, special_ids=tuple(sorted(special)))
        return found._replace(interface=interface)

    def task(self, adapter: Adapter) -> str | None:
        """The task of a decoder that reads images: ``image-text-to-text``; of other networks, as for transformers."""
        if adapter.interface.content[0] in TEXTS or adapter.interface.outputs != ("logits",):
            return super().task(adapter) if adapter.interface.content[0] in TEXTS else None
        writes = hasattr(adapter.model, "generate") and adapter.model.can_generate()  # type: ignore[operator]
        return TASK if writes and not type(adapter.model).__name__.endswith(TRANSDUCERS) else None

    def unscored(self, adapter: Adapter) -> str:
        """What the head predicts; nothing where a task scores it."""
        return "" if self.task(adapter) else super().unscored(adapter)

    def processor_of(self, blueprint: Mapping[str, Any], folder: str) -> Any:
        """Load the processor that is saved in a folder."""
        with sealed():
            return _processor_of(folder, {"trust_remote_code": False, "local_files_only": True})


def content_of(model: Any, content: str | None) -> str:
    """Return the argument that carries the content, by its name or by what it is."""
    known = (*media_of(model), *texts_of(model))
    if content is None:
        return known[0]
    for name in known:
        if content in (name, MEDIA.get(name, "text")):
            return name
    kinds = sorted({MEDIA.get(name, "text") for name in known})
    raise ExampleError(
        f"content must be {' or '.join(map(repr, kinds))}, or an argument of {type(model).__name__} "
        f"({', '.join(known)}), got {content!r}",
        model,
    )


def _of_texts(example_inputs: Any, processor: Any) -> bool:
    """Return whether inputs or a processor are those of texts alone."""
    if isinstance(example_inputs, Mapping):
        return not any(name in MEDIA for name in example_inputs)
    if isinstance(example_inputs, Tensor):
        return not example_inputs.is_floating_point()
    return example_inputs is None and hasattr(processor, "get_vocab") and not hasattr(processor, "image_processor")


def _placed(example: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    device, dtype = place_of(model)
    return {
        n: v.to(device, dtype if v.is_floating_point() else v.dtype) if isinstance(v, Tensor) else v
        for n, v in example.items()
    }


def _packed(example: Mapping[str, Any], name: str, given: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of an interface for a content that has several rows for each sample on its first axis."""
    value = example[name]
    batch = len(example[given[0]]) if given else len(value)
    if len(value) == batch or not batch or len(value) % batch:
        return {}
    return {"packed": (name,), "shapes": {name: (len(value) // batch, *value.shape[1:])}}


def _outputs(model: nn.Module, inputs: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    """Return the outputs of a network that count: logits, the embedding of the content, or the last hidden state."""
    output: Any = None
    with suppress(Exception), torch.no_grad(), evaluating(model):  # the survey says why it does not run
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


def _processor_of(place: str, hub: Mapping[str, Any]) -> Any:
    """Load the processor of a network, or its image processor with its tokenizer; ``None`` if there is none."""
    import transformers

    with suppress(Exception):  # a repository without one, or a library that it needs is missing
        found = transformers.AutoProcessor.from_pretrained(place, **hub)
        if hasattr(found, "tokenizer"):
            return found
    with suppress(Exception):
        image = transformers.AutoImageProcessor.from_pretrained(place, **hub)
        return ImageAndTextProcessor(image, transformers.AutoTokenizer.from_pretrained(place, **hub))
    return None
