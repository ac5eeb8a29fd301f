"""Adapter of networks for images or sound with text."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hf_stitch.adapters.base import Adapter, _locked
from hf_stitch.adapters.cutting.cut import NotACutError
from hf_stitch.adapters.cutting.interface import size_of_inputs
from hf_stitch.adapters.discovery.survey import Survey
from hf_stitch.adapters.examples import arguments_of
from hf_stitch.representation import Representation
from hf_stitch_towers.examples import MEDIA, placeholder, start_of
from hf_stitch_towers.inputs import OF_TEXT, WHOLE, inputs_of

__all__ = ["ImageTextAdapter"]


class ImageTextAdapter(Adapter):
    """Adapter that runs a network for images (sound, video) with text up to a cut and from a cut on.

    Layers are the blocks of the tower and of the decoder, and the modules on every path between them.
    :func:`hf_stitch.load` creates this adapter.

    Attributes:
        prompt: Text for images without a text; ``None`` without a prompt.

    Example:
        >>> import hf_stitch
        >>> from transformers import BertConfig, ViTConfig, VisionTextDualEncoderConfig, VisionTextDualEncoderModel
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        >>> config = VisionTextDualEncoderConfig.from_vision_text_configs(
        ...     ViTConfig(**sizes, image_size=8, patch_size=4), BertConfig(**sizes, vocab_size=20), projection_dim=4
        ... )
        >>> adapter = hf_stitch.load(VisionTextDualEncoderModel(config).eval())
        >>> adapter.interface.content, adapter.layers[0]
        (('pixel_values',), 'vision_model.layers.0')
    """

    prompt: str | None = None

    def beside(self, context: str | Mapping[str, Any] | None) -> ImageTextAdapter:
        """Return the adapter with a context for images without a text.

        Args:
            context: A text, converted to arguments by the processor of the network; or these arguments for one sample,
                as tensors or lists (``{"input_ids": …}``).

        Returns:
            A new adapter of the same network; the same adapter if the context is ``None``.

        Raises:
            ValueError: If the network does not accept a text with its content, a text is passed without a processor, or
                an argument is missing.
        """
        if context is None:
            return self
        if not self.interface.given or self.interface.modality == "text":
            return super().beside(context)  # type: ignore[return-value]
        adapter = copy.copy(self)
        if isinstance(context, str):
            adapter.prompt, arguments = context, self._arguments_of(context)
        else:
            arguments = {name: torch.as_tensor(value) for name, value in context.items()}
            if "decoder_input_ids" in self.interface.given and (first := start_of(self.model)) is not None:
                arguments = {"decoder_input_ids": torch.tensor([first]), **arguments}
        if missing := [name for name in self.interface.given if name not in arguments]:
            raise ValueError(f"context lacks {', '.join(missing)}, got {', '.join(arguments) or 'nothing'}")
        prompt = {name: value.tolist() for name, value in arguments.items()}
        adapter.interface = dataclasses.replace(self.interface, prompt=prompt)
        return adapter

    def _arguments_of(self, text: str) -> dict[str, Tensor]:
        """Return the arguments of one sample for a text, prepared by the processor together with a blank image."""
        if not hasattr(self.processor, "save_pretrained"):
            raise ValueError(
                f"{type(self.model).__name__} requires a processor for the context {text!r}: pass processor=, or "
                'arguments as context={"input_ids": …}'
            )
        shape = self.interface.shapes[self.interface.content[0]]
        height, width = shape[-2:] if len(shape) >= 3 else (64, 64)
        blank: Any = {"image": Image.new("RGB", (width, height), "grey"), "audio": np.zeros(16_000, dtype=np.float32)}
        arguments = self._inputs([{self._media: blank.get(self._media), "text": text}])
        return {
            name: value[0]
            for name, value in arguments.items()
            if name not in self.interface.content and not (name in WHOLE and bool(value.all()))
        }

    def preprocess(self, samples: Sequence[Any], *, offsets: bool = False) -> dict[str, Any]:
        """Convert images with texts to inputs of the network, with its processor and chat template.

        Args:
            samples: Images, lists of images, dictionaries ``{"image": …, "text": …}``, or tensors. Samples without a
                text get the context passed to :func:`hf_stitch.load`.
            offsets: Must be ``False``.

        Returns:
            The keyword arguments of the network, on its device and in its dtype.

        Raises:
            ValueError: If ``samples`` is empty, a sample lacks an image or a text, a text is too long or lacks the
                placeholder tokens of its images, or pixels are NaN or infinite. The message names the sample.

        Example:
            >>> import torch, hf_stitch
            >>> from transformers import GitConfig, GitForCausalLM
            >>> sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
            >>> vision = {**sizes, "image_size": 8, "patch_size": 4}
            >>> config = GitConfig(vision_config=vision, **sizes, vocab_size=20, bos_token_id=1, eos_token_id=2)
            >>> network = GitForCausalLM(config).eval()
            >>> adapter = hf_stitch.load(network, context={"input_ids": [3, 4]})
            >>> {name: tuple(value.shape) for name, value in adapter.preprocess([torch.ones(3, 8, 8)]).items()}
            {'pixel_values': (1, 3, 8, 8), 'input_ids': (1, 2)}
        """
        if self.interface.modality == "text" or not self.interface.given:
            return super().preprocess(samples, offsets=offsets)
        if offsets:
            raise ValueError("character offsets are not supported for texts with images: set offsets=False")
        return self._inputs(samples)

    def _inputs(self, samples: Sequence[Any]) -> dict[str, Any]:
        model, name = self.model, self.interface.content[0]
        mark = placeholder(model, MEDIA[name]) if name in self._example and self._has_marks else None
        inputs = inputs_of(
            samples, self.processor, self.interface, model, self.prompt, placeholder=mark,
            accepts=tuple(arguments_of(model, name)),
        )  # fmt: skip
        return {key: value for key, value in inputs.items() if not (key in WHOLE and bool(value.all()))}

    def positions_of_content(self, representation: Representation) -> Tensor:
        """Return the positions of the image, not of the text, at a layer of the decoder.

        Args:
            representation: From :meth:`encode`, at a layer with text and image in one sequence.

        Returns:
            (samples, positions) bool.

        Raises:
            ValueError: If the text of this network lacks image placeholder tokens, or the positions of the layer are
                not the positions of the text.

        Example:
            >>> import torch, hf_stitch
            >>> from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, CLIPVisionConfig
            >>> small = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
            >>> config = LlavaConfig(vision_config=CLIPVisionConfig(**small, image_size=8, patch_size=4),
            ...                      text_config=LlamaConfig(**small, vocab_size=20),
            ...                      image_token_index=19, image_seq_length=4)
            >>> network = hf_stitch.load(LlavaForConditionalGeneration(config).eval())
            >>> layer = network.layers[-1]
            >>> network.positions_of_content(network.encode(network.example, layer)[layer])[0].sum()
            tensor(4)
        """
        ids, mark = (representation.context or {}).get("input_ids"), placeholder(self.model, self._media)
        if ids is None or mark is None or not bool((ids == mark).any()):
            raise ValueError(
                f"texts of {type(self.model).__name__} do not contain placeholder tokens of its {self._media}"
            )
        if representation.layout != "bnd" or representation.values.shape[1] != ids.shape[1]:
            raise ValueError(
                f"the layer must have the {ids.shape[1]} positions of the text, got {representation.values.shape[1]}: "
                "pass a layer of the decoder"
            )
        return ids == mark

    @property
    def _media(self) -> str:
        """Kind of the content: image, audio or video."""
        return MEDIA[self.interface.content[0]]

    def exchange(self, part: str, encoder: Any, data: Any, run: Any, **options: Any) -> Any:
        """Replace a tower by another network (:func:`hf_stitch_towers.exchange.exchange`)."""
        from hf_stitch_towers.exchange import exchange

        return exchange(self, encoder, data, part, run, **options)

    @property
    def _has_marks(self) -> bool:
        """Whether texts of this network contain a placeholder token for each vector of an image, as its example."""
        ids = self._example.get("input_ids")
        mark = placeholder(self.model, self._media)
        return ids is not None and mark is not None and bool((ids == mark).any())

    def _survey(self, inputs: Mapping[str, Any] | None = None) -> Survey:
        """Return the survey; inputs must have as many image rows per sample as the example."""
        name = self.interface.content[0]
        if inputs is not None and isinstance(inputs.get(name), Tensor) and self.interface.text in inputs:
            samples, _ = size_of_inputs(inputs, self.interface)
            rows = self.interface.shapes[name][0] if name in self.interface.packed else 1
            if len(inputs[name]) != samples * rows:
                raise ValueError(
                    f"{type(self.model).__name__} is cut for {rows} rows of {name} per sample, got "
                    f"{len(inputs[name])} rows for {samples} samples: use the same number of images of one size in all "
                    "samples, and pass a batch of two as example_inputs to load (from adapter.preprocess)"
                )
        return super()._survey(inputs)

    @property
    @_locked
    def candidates(self) -> tuple[str, ...]:
        """Names of the blocks, and of the modules on every path between tower and decoder."""
        survey = self._survey()
        blocks, calls = survey.blocks, survey.trace.calls
        if not blocks or self.interface.modality == "text":
            return super().candidates
        first = next((block for block in blocks if not _in_text(survey, block)), None)
        start = -1 if first is None else calls[first].exited  # a tower without blocks
        around = [
            name
            for name, call in calls.items()
            if name
            and survey.dominates(name)
            and not any(_meet(name, block) for block in blocks)
            and not any(seen.is_output for seen in call.seen().values())
            and call.exited > start
        ]
        outermost = [name for name in around if not any(name.startswith(f"{outer}.") for outer in around)]
        return tuple(map(self.layer_name, sorted((*blocks, *outermost), key=lambda name: calls[name].exited)))


def _in_text(survey: Survey, block: str) -> bool:
    """Return whether the positions of a block are the positions of the text."""
    with suppress(NotACutError):
        return survey.cut(block).padding in OF_TEXT
    return False


def _meet(name: str, block: str) -> bool:
    return f"{name}.".startswith(f"{block}.") or f"{block}.".startswith(f"{name}.")
