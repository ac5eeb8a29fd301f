"""Stitched models with an image-to-text target."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from hf_stitch.adapters.cutting.cut import fill, in_context
from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.adapters.cutting.halves import HalfError
from hf_stitch.adapters.examples import arguments_of
from hf_stitch.adapters.preprocess import preprocess
from hf_stitch.artefacts.configuration import StitchConfig
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.representation import Representation
from hf_stitch_towers.examples import MEDIA, placeholder, start_of
from hf_stitch_towers.inputs import WaveformProcessor, inputs_of, with_decoder_input

__all__ = ["StitchedModelForImageTextToText"]


class StitchedModelForImageTextToText(StitchedModel):
    """Stitched model with a target that predicts the next token from an image and a text.

    It accepts the inputs of the source, and the context of the target (``input_ids`` and so on); without a context, it
    uses the context from loading the target. :func:`hf_stitch.stitch` builds it.

    Args:
        config: The config.
        *parts: Front half, stitching layer, back half and processor, as for :class:`~hf_stitch.StitchedModel`.
        **named: The same parts by name.

    Example:
        >>> import torch, hf_stitch
        >>> from transformers import GitConfig, GitForCausalLM
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        >>> vision = {**sizes, "image_size": 8, "patch_size": 4}
        >>> config = GitConfig(vision_config=vision, **sizes, vocab_size=20, bos_token_id=1, eos_token_id=2)
        >>> network = hf_stitch.load(GitForCausalLM(config).eval(), context={"input_ids": [1, 3]})
        >>> layer = network.layers[0]
        >>> model = hf_stitch.stitch(network, network, torch.randn(40, 3, 8, 8), source_layer=layer,
        ...                          target_layer=layer, matcher="identity", progress=False)
        >>> model.generate(pixel_values=torch.randn(2, 3, 8, 8), max_new_tokens=3, min_new_tokens=3).shape
        torch.Size([2, 5])
    """

    main_input_name = "pixel_values"
    supports_gradient_checkpointing = False
    auto_class: ClassVar[str] = "AutoModelForImageTextToText"

    def __init__(self, config: StitchConfig, *parts: Any, **named: Any) -> None:
        """Build the model as the base class does, and copy the generation config from the target."""
        super().__init__(config, *parts, **named)
        network: Any = self.target.model
        self.generation_config = copy.deepcopy(getattr(network, "generation_config", None) or GenerationConfig())

    @property
    def unscored(self) -> str:
        """Empty: the task scores the head."""
        return ""

    @property
    def context_names(self) -> tuple[str, ...]:
        """Names of the arguments of the target's context."""
        interface = self.target.interface
        accepted = arguments_of(self.target.model, interface.content[0])
        return tuple(
            name for name in (*interface.given, *interface.arguments, *interface.prompt, *BESIDE) if name in accepted
        )

    def _run(self, inputs: dict[str, Any], labels: Tensor | None = None) -> Any:
        """Run both halves, with the context of each sample for the target."""
        if labels is not None:
            raise ValueError(
                f"{type(self).__name__} does not accept labels: train the target, or use hf_stitch.training.TaskLoss"
            )
        representation, options = self._at_cut(inputs)
        return self.head(representation, **options)

    def _at_cut(self, inputs: Mapping[str, Any]) -> tuple[Representation, dict[str, Any]]:
        """Return the representation at the cut of the target, with the context, and the target's other arguments."""
        front, interface = self.source, self.target.interface
        context = {name: inputs[name] for name in dict.fromkeys(self.context_names) if name in inputs}
        of_source = {*front.takes.content, *front.takes.given, *front.takes.arguments, *front.takes.prompt}
        of_source |= set(arguments_of(front.model, front.takes.content[0])) if front.takes.given else set()
        rest = {name: value for name, value in inputs.items() if name not in context or name in of_source}
        options = {name: rest.pop(name) for name in ("logits_to_keep",) if name in rest and name not in of_source}
        rest.pop("use_cache", None)  # of the target, when it generates
        representation = self.transfer(**rest)
        if context or not interface.given:
            blank = (
                interface.blank(representation.batch, None, representation.values.device)
                if interface.modality != "text"
                else {}
            )
            if blank and not context.keys() >= set(interface.given) <= interface.prompt.keys():
                blank = {name: value for name, value in blank.items() if name in interface.content}
            elif context.keys() & interface.given:  # a text other than the prompt: arguments of the prompt do not apply
                blank = {
                    name: value for name, value in blank.items() if name in (*interface.content, *_of_images(interface))
                }
            representation = representation.replace(context={**blank, **context})
        return representation, options

    def can_generate(self) -> bool:  # type: ignore[override]
        """Return whether the target generates."""
        network = getattr(self._modules.get("target"), "model", None)  # missing while the model is built
        return network is not None and bool(network.can_generate())

    @property
    def uncached(self) -> str | None:
        """Reason for running ``generate`` without a cache; ``None`` with a cache."""
        if self.target.cut.padding in ("masked", "behind"):
            return "the target is cut in its decoder, where each new token comes from the source"
        return None

    @torch.no_grad()
    def generate(self, *, use_cache: bool | None = None, **inputs: Any) -> Tensor:
        """Generate texts about images, as ``generate`` of the target.

        Args:
            use_cache: Whether to use a key-value cache. Default: yes, if the target is cut before its decoder.
            **inputs: Inputs, as for :meth:`forward`, and options of ``generate`` (``max_new_tokens``, …).

        Returns:
            Token ids, in the format of the target.

        Raises:
            ValueError: If the target is cut in its decoder and a cache or beams are requested, or if an input is
                missing.
        """
        network: Any = self.target.model
        input_names = {*self.context_names, *arguments_of(self.source.model, self.source.takes.content[0])}
        input_names |= {*self.source.takes.content, "pixel_values", "input_ids", "attention_mask"}
        settings = {name: inputs.pop(name) for name in list(inputs) if name not in input_names}
        network.generation_config = self.generation_config
        text_names, takes = self.target.interface.given, self.source.takes
        if "input_ids" in inputs and "input_ids" not in (*text_names, *takes.content, *takes.given):
            # as generate of the target does
            inputs = with_decoder_input(inputs, len(inputs["input_ids"]), text_names, start_of(network))
        if self.uncached is not None:
            if use_cache:
                raise ValueError(f"this model generates without a cache, because {self.uncached}: omit use_cache")
            return self._token_by_token(inputs, settings)
        representation, _ = self._at_cut(inputs)
        half = self.target
        representation = in_context(half.cut.accept(representation, half.interface), half.interface)
        context = half.plan.context(representation, half.interface)
        values = half.cut.restore(representation.values.to(_dtype(half)))
        config = settings.get("generation_config") or self.generation_config
        beams, sequences = (settings.get(n, getattr(config, n, 1)) or 1 for n in ("num_beams", "num_return_sequences"))
        copies = max(beams, sequences)
        tokens = context[half.interface.given[0]].shape[1] if half.interface.given else 0

        def restart(module: nn.Module, args: Any, kwargs: Any) -> None:
            # Images are encoded before samples are copied for beams, or in the first forward, after it.
            rows = [
                len(value) for name in ("input_ids", *half.interface.given) if (value := kwargs.get(name)) is not None
            ]
            is_copied = bool(rows) and rows[0] == representation.batch * copies
            repeated = _copied(values, copies, representation.batch) if is_copied and copies > 1 else values
            fill(half._slot, repeated, (representation.batch * (copies if is_copied else 1), tokens))

        fill(half._slot, values, (representation.batch, tokens))
        handle = network.register_forward_pre_hook(restart, with_kwargs=True)
        try:
            with evaluating(network):
                ids: Tensor = network.generate(
                    **context, **settings, use_cache=True if use_cache is None else use_cache
                )
            return ids
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise HalfError(half, error) from error
        finally:
            handle.remove()
            half._slot.values = None

    def _token_by_token(self, inputs: Mapping[str, Any], settings: Mapping[str, Any]) -> Tensor:
        """Generate greedily, with one run of both halves over the whole text per token."""
        config = settings.get("generation_config") or self.generation_config
        supported = {"max_new_tokens", "min_new_tokens", "do_sample", "generation_config", "num_beams", "eos_token_id"}
        if wrong := settings.keys() - supported:
            raise ValueError(f"generate does not accept {', '.join(sorted(wrong))} for a cut in the decoder: omit it")
        if settings.get("do_sample") or (settings.get("num_beams") or 1) > 1:
            raise ValueError("generation from a cut in the decoder is greedy: omit do_sample and num_beams")
        most, least = settings.get("max_new_tokens") or config.max_new_tokens or 20, settings.get("min_new_tokens") or 0
        end = settings.get("eos_token_id", config.eos_token_id)
        ends = torch.tensor([end] if isinstance(end, int) else end or [-1])
        name, current = self.target.interface.given[0], dict(inputs)
        if name not in current:
            count = len(next(iter(current.values())))
            current |= {key: torch.tensor([row] * count) for key, row in self.target.interface.prompt.items()}
        done = torch.zeros(len(current[name]), dtype=torch.bool)
        pad = config.pad_token_id if config.pad_token_id is not None else int(ends[0])
        for step in range(most):
            logits = self(**current).logits[:, -1]
            if step < least and int(ends[0]) >= 0:
                logits[:, ends.to(logits.device)] = -torch.inf
            new = torch.where(done.to(logits.device), pad, logits.argmax(-1))
            done |= torch.isin(new.cpu(), ends)
            length = current[name].shape[1]
            for key, value in current.items():
                if key == name:
                    current[key] = torch.cat([value, new[:, None].to(value)], 1)
                elif key in GROWING and value.shape[1] == length:
                    last = torch.zeros_like(value[:, :1]) if "type" in key else torch.ones_like(value[:, :1])
                    current[key] = torch.cat([value, last], 1)
            if bool(done.all()):
                break
        ids: Tensor = current[name]
        return ids

    def processor_in(self, folder: str, blueprint: Mapping[str, Any]) -> Any:
        """Load the processor of images and texts saved in a folder; for images only, as the base class does."""
        from hf_stitch_towers.library import ImageText

        whole = ImageText().processor_of(blueprint, folder)
        return super().processor_in(folder, blueprint) if whole is None else whole

    def preprocess(self, samples: Sequence[Any], *, offsets: bool = False) -> dict[str, Tensor]:
        """Convert raw samples to inputs with the source's processor; see :meth:`hf_stitch.StitchedModel.preprocess`."""
        takes = self.source.takes
        if not takes.given:  # a processor of images and texts also prepares the context of the target
            names = (name for name in ("image_processor", "feature_extractor") if hasattr(self.processor, name))
            prepare = next((getattr(self.processor, name) for name in names), self.processor)
            prepare = WaveformProcessor(prepare, takes.content[0]) if hasattr(prepare, "sampling_rate") else prepare
            images = preprocess(samples, prepare, self.interface, self.source, offsets=offsets)
            has_text = any(isinstance(sample, Mapping) and sample.get("text") is not None for sample in samples)
            if not has_text or not hasattr(self.processor, "tokenizer"):  # text without a tokenizer
                return images
            interface = self.target.interface
            context = inputs_of(samples, self.processor, interface, self.target.model, accepts=self.context_names)
            return {**{name: value for name, value in context.items() if name not in interface.content}, **images}
        name = takes.content[0]
        mark = placeholder(self.source.model, MEDIA[name]) if name in MEDIA else None
        ids = takes.prompt.get("input_ids", ())
        return inputs_of(
            samples, self.processor, takes, self.source, placeholder=mark if mark in ids else None,
            accepts=tuple(arguments_of(self.source.model, name)),
        )  # fmt: skip


BESIDE = ("image_grid_thw", "image_grid_hws", "image_sizes", "pixel_attention_mask", "spatial_shapes")
"""Arguments that describe an image, in addition to its pixels."""

GROWING = ("attention_mask", "decoder_attention_mask", "token_type_ids", "mm_token_type_ids")
"""Arguments with one value per token."""


def _of_images(interface: Any) -> tuple[str, ...]:
    """Return the arguments of a prompt that belong to the image, not to the text."""
    return tuple(name for name in interface.prompt if name in BESIDE)


def _copied(values: Tensor, copies: int, batch: int) -> Tensor:
    """Repeat each sample, which may have several rows on the first axis."""
    return values.unflatten(0, (batch, -1)).repeat_interleave(copies, 0).flatten(0, 1)


def _dtype(half: nn.Module) -> torch.dtype:
    return next(
        (parameter.dtype for parameter in half.parameters() if parameter.is_floating_point()), torch.get_default_dtype()
    )
