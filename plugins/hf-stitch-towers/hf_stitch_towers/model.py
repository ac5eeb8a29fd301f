"""Stitched models whose target writes a text about an image."""

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
from hf_stitch_towers.inputs import Hearing, begun, inputs_of

__all__ = ["StitchedModelForImageTextToText"]


class StitchedModelForImageTextToText(StitchedModel):
    """A stitched model whose target reads an image and a text, and predicts the next token.

    It takes the inputs of the source, and beside them what the target reads with an image (``input_ids`` and so on);
    without them, each sample takes the context with which the target was loaded. :func:`hf_stitch.stitch` builds it.

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
        """Build the model as the base class does, and take the settings for generation from the target."""
        super().__init__(config, *parts, **named)
        network: Any = self.target.model
        self.generation_config = copy.deepcopy(getattr(network, "generation_config", None) or GenerationConfig())

    @property
    def unscored(self) -> str:
        """Nothing: the task scores the head."""
        return ""

    @property
    def context_names(self) -> tuple[str, ...]:
        """Names of the arguments that the target reads beside what enters at its cut."""
        own = self.target.interface
        known = arguments_of(self.target.model, own.content[0])
        return tuple(name for name in (*own.given, *own.arguments, *own.prompt, *BESIDE) if name in known)

    def _run(self, inputs: dict[str, Any], labels: Tensor | None = None) -> Any:
        """Run both halves; the target gets the context of each sample."""
        if labels is not None:
            raise ValueError(
                f"{type(self).__name__} takes no labels: train the target itself, or with hf_stitch.training.TaskLoss"
            )
        entering, options = self._entering(inputs)
        return self.head(entering, **options)

    def _entering(self, inputs: Mapping[str, Any]) -> tuple[Representation, dict[str, Any]]:
        """Return what enters the back half, in its context, and the other arguments of the target."""
        front, own = self.source, self.target.interface
        context = {name: inputs[name] for name in dict.fromkeys(self.context_names) if name in inputs}
        of_source = {*front.takes.content, *front.takes.given, *front.takes.arguments, *front.takes.prompt}
        of_source |= set(arguments_of(front.model, front.takes.content[0])) if front.takes.given else set()
        rest = {name: value for name, value in inputs.items() if name not in context or name in of_source}
        options = {name: rest.pop(name) for name in ("logits_to_keep",) if name in rest and name not in of_source}
        rest.pop("use_cache", None)  # of the target, when it generates
        entering = self.transfer(**rest)
        if context or not own.given:
            blank = own.blank(entering.batch, None, entering.values.device) if own.modality != "text" else {}
            if blank and not context.keys() >= set(own.given) <= own.prompt.keys():
                blank = {name: value for name, value in blank.items() if name in own.content}
            elif context.keys() & own.given:  # another text than the prompt: nothing of the prompt belongs to it
                blank = {name: value for name, value in blank.items() if name in (*own.content, *_of_images(own))}
            entering = entering.replace(context={**blank, **context})
        return entering, options

    def can_generate(self) -> bool:  # type: ignore[override]
        """Return whether the target generates."""
        network = getattr(self._modules.get("target"), "model", None)  # none while the model is built
        return network is not None and bool(network.can_generate())

    @property
    def uncached(self) -> str | None:
        """Why ``generate`` runs without a cache; ``None`` with one."""
        if self.target.cut.padding in ("masked", "behind"):
            return "the target is cut in its decoder, where each new token comes from the source"
        return None

    @torch.no_grad()
    def generate(self, *, use_cache: bool | None = None, **inputs: Any) -> Tensor:
        """Write texts about images, as ``generate`` of the target does.

        Args:
            use_cache: Whether to keep the past tokens. Default: yes, if the target is cut before its decoder.
            **inputs: Inputs, as for :meth:`forward`, and options of ``generate`` (``max_new_tokens``, …).

        Returns:
            Token ids, as the target returns them.

        Raises:
            ValueError: If the target is cut in its decoder, and a cache or beams are asked for; if an input is missing.
        """
        network: Any = self.target.model
        known = {*self.context_names, *arguments_of(self.source.model, self.source.takes.content[0]), "pixel_values"}
        known |= {*self.source.takes.content, "input_ids", "attention_mask"}
        settings = {name: inputs.pop(name) for name in list(inputs) if name not in known}
        network.generation_config = self.generation_config
        given = self.target.interface.given
        if {"input_ids"} - {*given, *self.source.takes.content, *self.source.takes.given} and "input_ids" in inputs:
            inputs = begun(inputs, len(inputs["input_ids"]), given, start_of(network))  # as generate of the target does
        if self.uncached is not None:
            if use_cache:
                raise ValueError(f"this model generates without a cache, because {self.uncached}: leave out use_cache")
            return self._token_by_token(inputs, settings)
        entering, _ = self._entering(inputs)
        half = self.target
        entering = in_context(half.cut.accept(entering, half.interface), half.interface)
        context = half.plan.context(entering, half.interface)
        values = half.cut.restore(entering.values.to(_dtype(half)))
        config = settings.get("generation_config") or self.generation_config
        beams, answers = (settings.get(n, getattr(config, n, 1)) or 1 for n in ("num_beams", "num_return_sequences"))
        copies = max(beams, answers)
        tokens = context[half.interface.given[0]].shape[1] if half.interface.given else 0

        def restart(module: nn.Module, args: Any, kwargs: Any) -> None:
            # Images are encoded before samples are copied for beams, or in the first forward, after it.
            rows = [
                len(value) for name in ("input_ids", *half.interface.given) if (value := kwargs.get(name)) is not None
            ]
            many = bool(rows) and rows[0] == entering.batch * copies
            own = _copied(values, copies, entering.batch) if many and copies > 1 else values
            fill(half._slot, own, (entering.batch * (copies if many else 1), tokens))

        fill(half._slot, values, (entering.batch, tokens))
        handle = network.register_forward_pre_hook(restart, with_kwargs=True)
        try:
            with evaluating(network):
                found: Tensor = network.generate(
                    **context, **settings, use_cache=True if use_cache is None else use_cache
                )
            return found
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise HalfError(half, error) from error
        finally:
            handle.remove()
            half._slot.values = None

    def _token_by_token(self, inputs: Mapping[str, Any], settings: Mapping[str, Any]) -> Tensor:
        """Generate greedily, with a run of both halves over the whole text for each token."""
        config = settings.get("generation_config") or self.generation_config
        asked = {"max_new_tokens", "min_new_tokens", "do_sample", "generation_config", "num_beams", "eos_token_id"}
        if wrong := settings.keys() - asked:
            raise ValueError(f"from a cut in the decoder, generate takes no {', '.join(sorted(wrong))}: leave it out")
        if settings.get("do_sample") or (settings.get("num_beams") or 1) > 1:
            raise ValueError(
                "from a cut in the decoder, texts are generated greedily: leave out do_sample and num_beams"
            )
        most, least = settings.get("max_new_tokens") or config.max_new_tokens or 20, settings.get("min_new_tokens") or 0
        end = settings.get("eos_token_id", config.eos_token_id)
        ends = torch.tensor([end] if isinstance(end, int) else end or [-1])
        name, given = self.target.interface.given[0], dict(inputs)
        if name not in given:
            count = len(next(iter(given.values())))
            given |= {key: torch.tensor([row] * count) for key, row in self.target.interface.prompt.items()}
        done = torch.zeros(len(given[name]), dtype=torch.bool)
        pad = config.pad_token_id if config.pad_token_id is not None else int(ends[0])
        for step in range(most):
            logits = self(**given).logits[:, -1]
            if step < least and int(ends[0]) >= 0:
                logits[:, ends.to(logits.device)] = -torch.inf
            new = torch.where(done.to(logits.device), pad, logits.argmax(-1))
            done |= torch.isin(new.cpu(), ends)
            length = given[name].shape[1]
            for key, value in given.items():
                if key == name:
                    given[key] = torch.cat([value, new[:, None].to(value)], 1)
                elif key in GROWING and value.shape[1] == length:
                    last = torch.zeros_like(value[:, :1]) if "type" in key else torch.ones_like(value[:, :1])
                    given[key] = torch.cat([value, last], 1)
            if bool(done.all()):
                break
        found: Tensor = given[name]
        return found

    def processor_in(self, folder: str, blueprint: Mapping[str, Any]) -> Any:
        """Load the processor of images and texts that is saved in a folder; of images alone, as the base class does."""
        from hf_stitch_towers.library import ImageText

        whole = ImageText().processor_of(blueprint, folder)
        return super().processor_in(folder, blueprint) if whole is None else whole

    def preprocess(self, samples: Sequence[Any], *, offsets: bool = False) -> dict[str, Tensor]:
        """Convert raw samples to inputs with the source's processor; see :meth:`hf_stitch.StitchedModel.preprocess`."""
        takes = self.source.takes
        if not takes.given:  # a processor of images and texts makes what the target reads, too
            names = ("image_processor", "feature_extractor")
            part = next((getattr(self.processor, n) for n in names if hasattr(self.processor, n)), self.processor)
            part = Hearing(part, takes.content[0]) if hasattr(part, "sampling_rate") else part
            found = preprocess(samples, part, self.interface, self.source, offsets=offsets)
            told = any(isinstance(each, Mapping) and each.get("text") is not None for each in samples)
            if not told or not hasattr(self.processor, "tokenizer"):  # which the target reads with its own
                return found
            own = self.target.interface
            made = inputs_of(samples, self.processor, own, self.target.model, accepts=self.context_names)
            return {**{name: value for name, value in made.items() if name not in own.content}, **found}
        name = takes.content[0]
        mark = placeholder(self.source.model, MEDIA[name]) if name in MEDIA else None
        ids = takes.prompt.get("input_ids", ())
        return inputs_of(
            samples, self.processor, takes, self.source, placeholder=mark if mark in ids else None,
            accepts=tuple(arguments_of(self.source.model, name)),
        )  # fmt: skip


BESIDE = ("image_grid_thw", "image_grid_hws", "image_sizes", "pixel_attention_mask", "spatial_shapes")
"""Further arguments that a network may read beside an image."""

GROWING = ("attention_mask", "decoder_attention_mask", "token_type_ids", "mm_token_type_ids")
"""Arguments with a value for each token."""


def _of_images(interface: Any) -> tuple[str, ...]:
    """Return the arguments of a prompt that belong to the image, not to the text."""
    return tuple(name for name in interface.prompt if name in BESIDE)


def _copied(values: Tensor, copies: int, batch: int) -> Tensor:
    """Repeat each sample, which may have several rows on the first axis."""
    return values.unflatten(0, (batch, -1)).repeat_interleave(copies, 0).flatten(0, 1)


def _dtype(half: nn.Module) -> torch.dtype:
    return next((each.dtype for each in half.parameters() if each.is_floating_point()), torch.get_default_dtype())
