"""Stitched causal language models."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, DynamicCache, GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.adapters.cutting.halves import HalfError, Observed
from hf_stitch.adapters.cutting.interface import MASK, positions_of
from hf_stitch.adapters.libraries.configs import positions_from_padding
from hf_stitch.adapters.prefixes import PrefixFront
from hf_stitch.artefacts.cache import (
    NAME,
    NAMES,
    STATES,
    WITHOUT_WINDOW,
    HalfCache,
    Shape,
    UncachedError,
    accepts_any_cache_name,
    accepts_argument,
    cache_argument,
    cache_in,
    check_cache,
    check_shapes,
    decoder_layers,
    half_view,
    has_no_attention,
    layer_types,
    past_of,
    rename_cache,
    select_tokens,
)
from hf_stitch.artefacts.configuration import StitchConfig
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.artefacts.network import READ_IN_TEXTS, extra_outputs_of, flags
from hf_stitch.printing import warn
from hf_stitch.stitches import SequenceStitch
from hf_stitch.tasks.base import logits_of

CHECKING = threading.RLock()
"""Lock of the cache check."""

AHEAD = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp", "prefill_chunk_size")
"""Generation options that process several tokens at once and revert some, or split a text at any token."""


class StitchedModelForCausalLM(StitchedModel, GenerationMixin):  # type: ignore[misc]  # push_to_hub is ours
    """Stitched causal language model.

    :meth:`forward` returns a ``CausalLMOutputWithPast``. ``generate`` works as for any language model of transformers,
    with a shared cache if both networks are decoders (otherwise :attr:`uncached` is the reason). If the source attends
    to the whole text (BERT, the encoder of T5), each new token requires a run over the whole text. The special token
    ids for generation come from the target (``generation_config``). :func:`hf_stitch.stitch` builds this class for
    targets of the task ``text-generation``.

    Models of networks with different tokenizers (``align="prefix"``) accept tokens of the target; for each token, the
    source receives the text up to its end (:class:`hf_stitch.adapters.prefixes.PrefixReader`). Their cache starts with
    the layers of the target; its source layers contain the source's tokens of the current text.

    Args:
        config: The config.
        *parts: Front half, stitching layer, back half and processor, as for :class:`~hf_stitch.StitchedModel`.
        **named: The same parts by name.

    Example:
        >>> import torch, hf_stitch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2)
        >>> network = hf_stitch.load(GPT2LMHeadModel(config).eval())
        >>> layer = "transformer.h.0"
        >>> spec = network.spec(layer)
        >>> identity = hf_stitch.stitches.IdentityStitch(8, 8)
        >>> stitch = hf_stitch.stitches.StitchingLayer(spec, spec, "none", identity)
        >>> model = hf_stitch.artefacts.joining.join(network, layer, stitch, network, layer, task="text-generation")
        >>> type(model).__name__, model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
        ('StitchedModelForCausalLM', torch.Size([1, 3, 20]))
    """

    accepts_loss_kwargs = True
    auto_class: ClassVar[str] = "AutoModelForCausalLM"

    def __init__(self, config: StitchConfig, *parts: Any, **named: Any) -> None:
        """Build the model as in the base class, and copy the generation settings from both networks."""
        super().__init__(config, *parts, **named)
        self.stitch.check_causal()
        target: Any = self.target.model
        if hasattr(target, "config"):  # generation uses the config of the outputs
            text_config = target.config.get_text_config(decoder=True)
            for name in READ_IN_TEXTS:
                setattr(config, name, getattr(text_config, name, None))
        if hasattr(target, "generation_config"):
            self.generation_config = copy.deepcopy(target.generation_config)
        self.cache_is_checked = False
        self._shapes: list[Shape | None] | None = None  # of the layers of the cache, set by its check
        self._counts_from_padding = [
            positions_from_padding(half.model) is not None for half in (self.source, self.target)
        ]
        try:
            self.number_layers()
        except UncachedError as reason:
            self._why_uncached = str(reason)

    def number_layers(self) -> tuple[int, ...]:
        """Number the cached layers of both halves for a shared cache, starting with the source.

        A half of a stitched model has fewer layers, and renumbers them.

        Raises:
            UncachedError: If one of the halves is not a decoder with a cache.
        """
        self._layers: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        config = self.config
        config.num_hidden_layers = config.layer_types = config.sliding_window = None
        halves: list[Any] = [self.source.model, self.target.model]
        numbers = [decoder_layers(half) for half in halves]
        types = [layer_types(half, layers) for half, layers in zip(halves, numbers, strict=True)]
        if isinstance(self.source, PrefixFront):
            if not all(numbers):
                raise UncachedError("with different tokenizers, both halves require at least one layer with a past")
            types.reverse()
        cached_types = [*types[0], *types[1]]
        windows = {window for _, window in cached_types if window is not None}
        if len(windows) > 1:  # a cache has one window for all layers: with two, all layers keep the whole past
            cached_types = [(WITHOUT_WINDOW.get(kind, kind), None) for kind, _ in cached_types]
        if NAMES[0] != NAME and cached_types and all(kind in STATES for kind, _ in cached_types):
            raise UncachedError("transformers before 5.24 generates with a cache only if a layer stores tokens")
        config.layer_types, config.num_hidden_layers = [kind for kind, _ in cached_types], len(cached_types)
        config.sliding_window = windows.pop() if len(windows) == 1 else None
        self._layers = (numbers[0], numbers[1])
        return tuple(range(len(cached_types)))

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output layer of the target."""
        target: Any = self.target.model
        layer: nn.Module | None = target.get_output_embeddings()
        return layer

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the output layer of the target."""
        target: Any = self.target.model
        target.set_output_embeddings(value)

    @property
    def base_model(self) -> Any:
        """The model without its last layer, for libraries that use ``last_hidden_state``."""
        return Backbone(self)

    @property
    def uncached(self) -> str | None:
        """Reason for running without a cache; ``None`` for a model with a cache."""
        if isinstance(self.stitch.body, SequenceStitch):
            return f"the stitch, {self.stitch.body.title}, processes all tokens at once"
        return self._why_uncached if self._layers is None else None

    @can_return_tuple  # type: ignore[untyped-decorator]
    @accepts_any_cache_name
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        cache: Cache | None = None, labels: Tensor | None = None, use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0, num_items_in_batch: int | Tensor | None = None,
        inputs_embeds: Tensor | None = None, output_hidden_states: bool | int | Sequence[int] | None = None,
        output_attentions: bool | None = None, **inputs: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Compute the logits of the next tokens.

        Args:
            input_ids: Token ids (batch, tokens) int64; with a cache, only the new tokens.
            attention_mask: (batch, tokens), 1 for real tokens and 0 for padding; with a cache, including the past.
            position_ids: (batch, tokens) int64, for decoders that accept them.
            cache: A cache of this model: an empty ``DynamicCache()``, or the cache of an earlier output. The argument
                has the name of the installed transformers: ``past_key_values`` before 5.24.
            labels: Token ids (batch, tokens), -100 for ignored tokens. They are shifted inside the model.
            use_cache: Whether to create a cache if none is passed. Default: ``config.use_cache``, otherwise false.
            logits_to_keep: Number of last tokens, or positions of the tokens, to compute logits for; 0: all tokens.
            num_items_in_batch: Total number of labels of the batches in a gradient accumulation step; the sum of the
                losses is divided by it. Default: the loss is the mean.
            inputs_embeds: Replacement for token ids, for sources that accept them: (batch, tokens, width).
            output_hidden_states: As for :meth:`hf_stitch.StitchedModel.forward`.
            output_attentions: As for :meth:`hf_stitch.StitchedModel.forward`.
            **inputs: Further inputs of the source; ``shift_labels``, already shifted token ids (batch, tokens) in place
                of ``labels``; ``return_dict=False`` to return a tuple. For networks with different tokenizers, the
                tensors of a :class:`hf_stitch.adapters.prefixes.Reading` (``source_input_ids``,
                ``source_attention_mask``, ``source_position_ids``, ``alignment``, and with a cache ``source_kept``).
                By default they are computed from the tokens; with a non-empty cache they are required, because the
                cache does not contain the text: ``model.source.read(ids, mask, new).to_inputs()``.

        Returns:
            ``logits`` (batch, tokens, vocabulary), with labels the mean cross-entropy as ``loss``, and the cache (under
            the name of the argument), if any.
        """
        self.stitch.check_causal()
        # Not a parameter: with two names of labels, the Trainer would not compute a loss for batches with only one.
        shifted_labels = inputs.pop("shift_labels", None)
        if isinstance(self.source, PrefixFront) and input_ids is not None and "source_input_ids" not in inputs:
            if cache is not None and cache.get_seq_length():
                raise ValueError(
                    "a cache does not contain the text, so the inputs of the source are required: pass "
                    "**model.source.read(all_ids, mask, new).to_inputs(), or use generate"
                )
            inputs |= self.source.read(input_ids, attention_mask).to_inputs()
        source_kept = inputs.pop("source_kept", None) if isinstance(self.source, PrefixFront) else None
        arguments = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "inputs_embeds": inputs_embeds,
            "output_hidden_states": output_hidden_states,
            "output_attentions": output_attentions,
        }
        arguments = {name: argument for name, argument in (arguments | inputs).items() if argument is not None}
        requested = self._requested_outputs(arguments)
        target_flags: dict[str, Any] = flags(self.target, requested)
        observed = Observed(flags(self.source, requested)) if requested else None
        cache = self._joint_cache(cache, getattr(self.config, "use_cache", None) if use_cache is None else use_cache)
        tokens = input_ids if inputs_embeds is None else inputs_embeds[..., 0]
        source_options, target_options = self._options(cache, tokens, attention_mask, position_ids)
        selects_tokens = accepts_argument(self.target.model, "logits_to_keep")
        if selects_tokens:
            target_options["logits_to_keep"] = logits_to_keep
        self._check_position_ids(position_ids)
        if cache is not None and isinstance(self.source, PrefixFront) and source_kept is None:
            raise ValueError("with a cache, a source with another tokenizer also requires source_kept")
        try:
            representation = self.transfer(observed, **arguments | source_options)
            if source_kept is not None and cache is not None:
                select_tokens(cache_in(source_options), source_kept)
            output = self.head(representation, **target_options, **target_flags)
        except HalfError as error:
            if cache is not None:
                error.add_note(f"Or the cache passed as {NAME} belongs to another model.")
            raise
        if observed is not None:
            for name, values in self._join_outputs(requested, observed, representation, output).items():
                output[name] = values
        output.loss = _loss(output.logits, labels, shifted_labels, num_items_in_batch)
        if not selects_tokens and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            kept_tokens = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            output.logits = output.logits[:, kept_tokens]
        setattr(output, NAME, cache)
        return output

    def _joint_cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        if cache is None and not use_cache:
            return None
        if not isinstance(cache, HalfCache):  # else passed by the check or by a chain
            self._check_cache()
        if (reason := self.uncached) is not None:
            raise ValueError(f"this model runs without a cache, because {reason}: pass use_cache=False without {NAME}")
        if cache is None:
            return DynamicCache(config=self.config)
        if not isinstance(layers := getattr(cache, "layers", None), list):
            raise ValueError(f"{NAME} must be a Cache of transformers with layers, got a {type(cache).__name__}")
        if not layers:  # a cache that grows with use
            layers.extend(DynamicCache(config=self.config).layers)
        if len(layers) != self.config.num_hidden_layers:
            raise ValueError(
                f"the cache has {len(layers)} layers, but this model has {self.config.num_hidden_layers}: pass the "
                "cache of an earlier output of this model, or an empty DynamicCache()"
            )
        if isinstance(self.source, PrefixFront) and cache.is_compileable:
            raise ValueError("a source with another tokenizer requires a cache that can shrink: use a DynamicCache")
        if self._shapes is not None:
            check_shapes(cache, self._shapes)
        return cache

    def _get_static_cache_init_shape(self) -> None:
        """Let each layer of a static cache set its shape on its first run: the halves may have different heads."""

    def _check_cache(self) -> None:
        """Check once whether the model computes the same with its cache; otherwise disable the cache."""
        readable = not isinstance(self.source, PrefixFront) or self.source.reader is not None
        if self.uncached is not None or not readable or torch.compiler.is_compiling():
            return
        with CHECKING:  # other threads wait
            if self.cache_is_checked:
                return
            try:
                with evaluating(self):
                    self._shapes = check_cache(self)
            except UncachedError as reason:
                self._layers, self._why_uncached = None, str(reason)
            self.cache_is_checked = True

    def _options(
        self, cache: Cache | None, input_ids: Tensor | None, mask: Tensor | None, position_ids: Tensor | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return additional arguments of source and target: positions, and the cache in the numbering of each half."""
        options_of_halves: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        past, num_new = None if cache is None else past_of(cache), 0 if input_ids is None else input_ids.shape[1]
        layers_of_halves = self._layers or (None, None)
        position_rules = zip(self._counts_from_padding, self._accepts_positions, strict=True)
        halves = list(zip(options_of_halves, (self.source, self.target), layers_of_halves, position_rules, strict=True))
        first_layer, two_tokenizers = 0, isinstance(self.source, PrefixFront)
        for options, half, layers, (from_padding, accepts_positions) in reversed(halves) if two_tokenizers else halves:
            is_prefix_source = two_tokenizers and half is self.source  # with separate positions and mask
            if accepts_positions:
                if position_ids is not None:
                    options["position_ids"] = position_ids
                    if mask is None and cache is None and accepts_argument(half.model, MASK):
                        options[MASK] = None  # with a mask, texts packed into one row would attend to each other
                elif input_ids is not None and not from_padding and mask is not None and mask.dim() == 2:
                    options["position_ids"] = positions_of(mask)[:, -num_new:]
                elif past is not None and input_ids is not None and not from_padding:
                    options["position_ids"] = (torch.arange(num_new, device=input_ids.device) + past)[None]
            if cache is not None and layers is not None:
                view = half_view(cache, first_layer, layers, past)
                options |= {cache_argument(half.model): view, "use_cache": bool(layers)}
                first_layer += len(layers)
                if not is_prefix_source:  # the representation has the mask of the new tokens only, enough for states
                    only_states = view is not None and mask is not None and has_no_attention(view.layers)
                    options["attention_mask"] = mask[:, -num_new:] if only_states and mask is not None else mask
        return options_of_halves

    @property
    def _accepts_positions(self) -> tuple[bool, bool]:
        """Whether each half accepts the positions of the target's tokens."""
        source, target = (
            any(half.model._accepts_positions) if isinstance(half.model, StitchedModelForCausalLM)
            else accepts_argument(half.model, "position_ids") and not (from_padding and self._layers is None)
            for half, from_padding in zip((self.source, self.target), self._counts_from_padding, strict=True)
        )  # fmt: skip
        return source and not isinstance(self.source, PrefixFront), target

    def _check_generates(self) -> None:
        """Raise an error if the target generates from other tokens than a stitched model would pass."""
        network: Any = self
        while isinstance(network, StitchedModel):
            network = network.target.model
        ids = torch.full((1, 2), self.target.interface.filler_id)
        prepare = getattr(network, "prepare_inputs_for_generation", None)
        prepared_ids = ids if prepare is None else prepare(ids).get("input_ids", ids)
        if num_extra := prepared_ids.shape[1] - ids.shape[1]:
            raise ValueError(
                f"the target, {type(network).__name__}, appends {num_extra} token{'s'[: num_extra > 1]} to the text "
                "during generation, which the source does not receive: use the logits of forward"
            )

    def _check_position_ids(self, position_ids: Tensor | None) -> None:
        if position_ids is not None and not any(self._accepts_positions):
            raise ValueError(
                f"neither network ({type(self.source.model).__name__}, {type(self.target.model).__name__}) uses "
                "position_ids: leave it out"
            )

    def generate(
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Generate text, as with any language model of transformers.

        A model without a cache runs over the whole text for each token; a warning states the reason (:attr:`uncached`).

        Args:
            inputs: (batch, tokens) int64, the texts to continue.
            generation_config: Settings. Default: :attr:`generation_config`.
            *args: As for the method of transformers.
            **kwargs: As for the method of transformers.
        """
        if self.source.takes.given:
            raise ValueError(
                f"the source also requires {', '.join(self.source.takes.given)}, which generation does not pass: "
                "stitch its encoder alone (hf_stitch.load(…, task='text-encoding'))"
            )
        self._check_generates()
        self._check_position_ids(kwargs.get("position_ids"))
        kwargs = rename_cache(kwargs, NAME, callers=2)
        settings = generation_config or self.generation_config
        use_cache = kwargs.get("use_cache", settings.use_cache)
        if use_cache is not False:
            self._check_cache()
            if (reason := self.uncached) is not None:
                if kwargs.get("use_cache") or kwargs.get(NAME) is not None:
                    self._joint_cache(kwargs.get(NAME), True)  # raises
                warn(f"each token requires a run over the whole text, because {reason}")
                if generation_config is None:
                    kwargs["use_cache"] = False
                else:
                    generation_config = copy.deepcopy(generation_config)
                    generation_config.use_cache = False
        for name in AHEAD if isinstance(self.source, PrefixFront) else ():
            if kwargs.get(name) is not None or getattr(settings, name, None) is not None:
                raise ValueError(
                    f"{name} is not supported for networks with different tokenizers, because their caches have "
                    "different lengths: leave it out"
                )
        generate: Any = super().generate
        return generate(inputs, generation_config, *args, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the inputs of a generation step; with two tokenizers, including the inputs of the source.

        Args:
            input_ids: (batch, tokens) int64, all tokens so far.
            next_sequence_length: Number of tokens at the end that are not in the cache; ``None`` for all.
            **kwargs: As for the method of transformers, which requires this name.
        """
        prepare: Any = super().prepare_inputs_for_generation
        inputs: dict[str, Any] = prepare(input_ids, next_sequence_length=next_sequence_length, **kwargs)
        if not any(self._accepts_positions):
            inputs.pop("position_ids", None)
        if isinstance(self.source, PrefixFront):
            cache, layers = cache_in(kwargs), self._layers
            past = cache.get_seq_length(len(layers[1])) if cache is not None and layers else None
            reading = self.source.read(input_ids, kwargs.get("attention_mask"), next_sequence_length, past)
            inputs |= reading.to_inputs()
        return inputs

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None, **_: Any) -> Tensor | None:
        """Return the (batch, tokens) mask unchanged, because each half converts it for its attention.

        Args:
            attention_mask: (batch, tokens), 1 for real tokens and 0 for padding.
            **_: Other arguments of transformers; ignored.
        """
        return attention_mask

    def _with_head(self, output: Any, labels: Tensor | None) -> CausalLMOutputWithPast:
        logits = logits_of(output)
        return CausalLMOutputWithPast(loss=_loss(logits, labels), logits=logits, **extra_outputs_of(output))


def _loss(
    logits: Tensor, labels: Tensor | None, shifted: Tensor | None = None, count: int | Tensor | None = None
) -> Tensor | None:
    """Return the mean cross-entropy of the next tokens, or the sum divided by ``items``; ``None`` without labels."""
    if shifted is None:
        if labels is None:
            return None
        logits, shifted = logits[:, :-1], labels[:, 1:]
    logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    shifted = shifted.flatten().to(logits.device)
    loss = functional.cross_entropy(logits, shifted, ignore_index=-100, reduction="mean" if count is None else "sum")
    return loss if count is None else loss / (count.to(loss.device) if isinstance(count, Tensor) else count)


class Backbone:
    """``base_model`` of a language model: returns the hidden states before the output layer.

    TRL computes its losses from the hidden states and the output layer. Models that scale or cap the output of this
    layer raise an error, because TRL would compute different logits.
    """

    _tp_plan = _pp_plan = None

    def __init__(self, model: StitchedModelForCausalLM) -> None:
        self._of = model

    def __call__(self, *args: Any, **inputs: Any) -> BaseModelOutput:
        """Run the model and return the input of its last layer."""
        calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        head: Any = self._of.get_output_embeddings()
        hook = head.register_forward_hook(lambda _, args, logits: calls.append((args[0], logits)))
        try:
            output = type(self._of).forward(
                self._of, *args, **inputs | {"return_dict": True}
            )  # TRL replaces the forward of the object
        finally:
            hook.remove()
        states, logits = calls[-1]
        if not torch.allclose(logits.to(output.logits), output.logits, rtol=0, atol=0, equal_nan=True):
            raise ValueError(
                f"the target, {type(self._of.target.model).__name__}, scales or caps the outputs of its last layer, so "
                "they are not the logits: train it with the Trainer of transformers"
            )
        return BaseModelOutput(last_hidden_state=states, **extra_outputs_of(output))
