"""Stitched models whose target is a causal language model."""

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
    by_one_name,
    cache_argument,
    check_cache,
    check_shapes,
    decoder_layers,
    given_cache,
    has_no_attention,
    keep,
    layer_types,
    past_of,
    shown,
    takes,
    under_any_name,
)
from hf_stitch.artefacts.configuration import StitchConfig
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.artefacts.network import READ_IN_TEXTS, flags, seen_in
from hf_stitch.printing import warn
from hf_stitch.stitches import SequenceStitch
from hf_stitch.tasks.base import logits_of

CHECKING = threading.RLock()
"""Held while a model checks its cache."""

AHEAD = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp", "prefill_chunk_size")
"""Options of generation that process several tokens at once and take some back, or cut a text anywhere."""


class StitchedModelForCausalLM(StitchedModel, GenerationMixin):  # type: ignore[misc]  # push_to_hub is ours
    """A stitched model whose target predicts the next token.

    :meth:`forward` returns a ``CausalLMOutputWithPast``. ``generate`` works as for any language model of transformers,
    with one cache of both networks if both are decoders (:attr:`uncached` has the reason if not). If the source attends
    to the whole text (BERT, the encoder of T5), each new token takes a run over the whole text. The ids of special
    tokens for generation come from the target (``generation_config``). :func:`hf_stitch.stitch` builds this class for
    targets of the task ``text-generation``.

    Networks with different tokenizers (``align="prefix"``) take tokens of the target, and the source reads the text up
    to the end of each (:class:`hf_stitch.adapters.prefixes.PrefixReader`). The cache then contains the layers of the
    target first, and of the source the tokens of the present text.

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
        """Build the model as the base class does, and take the settings for generation from both networks."""
        super().__init__(config, *parts, **named)
        self.stitch.check_causal()
        target: Any = self.target.model
        if hasattr(target, "config"):  # that of the outputs, which generation reads
            known = target.config.get_text_config(decoder=True)
            for name in READ_IN_TEXTS:
                setattr(config, name, getattr(known, name, None))
        if hasattr(target, "generation_config"):
            self.generation_config = copy.deepcopy(target.generation_config)
        self.cache_is_checked = False
        self._shapes: list[Shape | None] | None = None  # of the layers of the cache, known when it was checked
        self._counts_from_padding = [
            positions_from_padding(half.model) is not None for half in (self.source, self.target)
        ]
        try:
            self.number_layers()
        except UncachedError as reason:
            self._why_uncached = str(reason)

    def number_layers(self) -> tuple[int, ...]:
        """Number the layers of both halves that have a past for one cache, those of the source first.

        A model of which a half is cut has fewer layers, and numbers them again.

        Raises:
            UncachedError: If one of the halves is not a decoder with a cache.
        """
        self._layers: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        config = self.config
        config.num_hidden_layers = config.layer_types = config.sliding_window = None
        halves: list[Any] = [self.source.model, self.target.model]
        numbers = [decoder_layers(half) for half in halves]
        kept = [layer_types(half, layers) for half, layers in zip(halves, numbers, strict=True)]
        if isinstance(self.source, PrefixFront):
            if not all(numbers):
                raise UncachedError("with different tokenizers, both halves need layers with a past, and one has none")
            kept.reverse()
        each = [*kept[0], *kept[1]]
        windows = {window for _, window in each if window is not None}
        if len(windows) > 1:  # a cache has one window for all layers: with two, all layers keep the whole past
            each = [(WITHOUT_WINDOW.get(kind, kind), None) for kind, _ in each]
        if NAMES[0] != NAME and each and all(kind in STATES for kind, _ in each):
            raise UncachedError("transformers before 5.24 generates with a cache only if a layer keeps tokens")
        config.layer_types, config.num_hidden_layers = [kind for kind, _ in each], len(each)
        config.sliding_window = windows.pop() if len(windows) == 1 else None
        self._layers = (numbers[0], numbers[1])
        return tuple(range(len(each)))

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the layer of the target that predicts tokens."""
        target: Any = self.target.model
        found: nn.Module | None = target.get_output_embeddings()
        return found

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Exchange the layer of the target that predicts tokens."""
        target: Any = self.target.model
        target.set_output_embeddings(value)

    @property
    def base_model(self) -> Any:
        """The model without its last layer, for libraries that read hidden states: ``last_hidden_state``."""
        return Backbone(self)

    @property
    def uncached(self) -> str | None:
        """Why the model runs without a cache; ``None`` for a model with a cache."""
        if isinstance(self.stitch.body, SequenceStitch):
            return f"the stitch, {self.stitch.body.title}, reads all tokens at once"
        return self._why_uncached if self._layers is None else None

    @can_return_tuple  # type: ignore[untyped-decorator]
    @under_any_name
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        cache: Cache | None = None, labels: Tensor | None = None, use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0, num_items_in_batch: int | Tensor | None = None,
        inputs_embeds: Tensor | None = None, output_hidden_states: bool | int | Sequence[int] | None = None,
        output_attentions: bool | None = None, **inputs: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Compute the logits of the next tokens.

        Args:
            input_ids: Token ids (batch, tokens) int64; with a cache, only the tokens that are not in it.
            attention_mask: (batch, tokens), 1 for real tokens and 0 for padding; with a cache, including the past.
            position_ids: (batch, tokens) int64, for decoders that take them.
            cache: A cache of this model: an empty ``DynamicCache()``, or the cache of an earlier output. The argument
                has the name that it has in the installed transformers: ``past_key_values`` before 5.24.
            labels: Token ids (batch, tokens), -100 for ignored tokens. They are shifted inside the model.
            use_cache: Whether to create a cache if none is given. Default: ``config.use_cache``, or else no.
            logits_to_keep: Compute only the logits of this many last tokens, or of the tokens at these positions; 0:
                all tokens.
            num_items_in_batch: Number of labels of all batches whose gradients are accumulated, by which the sum of
                the losses is divided. Default: the loss is their mean.
            inputs_embeds: In place of token ids, for sources that take them: (batch, tokens, width).
            output_hidden_states: As for :meth:`hf_stitch.StitchedModel.forward`.
            output_attentions: As for :meth:`hf_stitch.StitchedModel.forward`.
            **inputs: Further inputs of the source; ``shift_labels``, token ids (batch, tokens) in place of ``labels``,
                of the token after each; ``return_dict=False`` to return a tuple. For networks with different
                tokenizers, the tensors of a :class:`hf_stitch.adapters.prefixes.Reading` (``source_input_ids``,
                ``source_attention_mask``, ``source_position_ids``, ``alignment``, and with a cache ``source_kept``).
                Without them they are computed from the tokens; with a cache that is not empty they must be given,
                because it contains no text: ``model.source.read(ids, mask, new).to_inputs()``.

        Returns:
            ``logits`` (batch, tokens, vocabulary), with labels the mean cross-entropy as ``loss``, and the cache if
            there is one, by the name of the argument.
        """
        self.stitch.check_causal()
        # Not a parameter: with two names of labels, the Trainer would compute no loss of a batch that has only one.
        ahead = inputs.pop("shift_labels", None)
        if isinstance(self.source, PrefixFront) and input_ids is not None and "source_input_ids" not in inputs:
            if cache is not None and cache.get_seq_length():
                raise ValueError(
                    "a cache contains no text, so that what the source reads must be given: pass "
                    "**model.source.read(all_ids, mask, new).to_inputs(), or use generate"
                )
            inputs |= self.source.read(input_ids, attention_mask).to_inputs()
        kept = inputs.pop("source_kept", None) if isinstance(self.source, PrefixFront) else None
        named = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "inputs_embeds": inputs_embeds,
            "output_hidden_states": output_hidden_states,
            "output_attentions": output_attentions,
        }
        named = {name: value for name, value in (named | inputs).items() if value is not None}
        asked = self._asked(named)
        more: dict[str, Any] = flags(self.target, asked)
        seen = Observed(flags(self.source, asked)) if asked else None
        cache = self._joint_cache(cache, getattr(self.config, "use_cache", None) if use_cache is None else use_cache)
        tokens = input_ids if inputs_embeds is None else inputs_embeds[..., 0]
        before, after = self._options(cache, tokens, attention_mask, position_ids)
        keeps = takes(self.target.model, "logits_to_keep")
        if keeps:
            after["logits_to_keep"] = logits_to_keep
        self._check_used(position_ids)
        if cache is not None and isinstance(self.source, PrefixFront) and kept is None:
            raise ValueError("with a cache, a source with another tokenizer also takes source_kept")
        try:
            entering = self.transfer(seen, **named | before)
            if kept is not None and cache is not None:
                keep(given_cache(before), kept)
            output = self.head(entering, **after, **more)
        except HalfError as error:
            if cache is not None:
                error.add_note(f"Or the cache that was given as {NAME} belongs to another model.")
            raise
        if seen is not None:
            for name, values in self._joined(asked, seen, entering, output).items():
                output[name] = values
        output.loss = _loss(output.logits, labels, ahead, num_items_in_batch)
        if not keeps and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            output.logits = output.logits[:, last]
        setattr(output, NAME, cache)
        return output

    def _joint_cache(self, given: Cache | None, use_cache: bool | None) -> Cache | None:
        if given is None and not use_cache:
            return None
        if not isinstance(given, HalfCache):  # part of a chain, or of the check
            self._check_cache()
        if (why := self.uncached) is not None:
            raise ValueError(f"this model has no cache, because {why}: pass use_cache=False, and no {NAME}")
        if given is None:
            return DynamicCache(config=self.config)
        if not isinstance(layers := getattr(given, "layers", None), list):
            raise ValueError(f"{NAME} must be a Cache of transformers with layers, got a {type(given).__name__}")
        if not layers:  # a cache that grows with use
            layers.extend(DynamicCache(config=self.config).layers)
        if len(layers) != self.config.num_hidden_layers:
            raise ValueError(
                f"the cache has {len(layers)} layers, but this model has {self.config.num_hidden_layers}: pass the "
                "cache of an earlier output of this model, or an empty DynamicCache()"
            )
        if isinstance(self.source, PrefixFront) and given.is_compileable:
            raise ValueError("a source with another tokenizer needs a cache that shrinks: use a DynamicCache")
        if self._shapes is not None:
            check_shapes(given, self._shapes)
        return given

    def _get_static_cache_init_shape(self) -> None:
        """Let each layer of a static cache take its shape when it first runs: the halves may have unlike heads."""

    def _check_cache(self) -> None:
        """Find out, once, whether the model computes the same with its cache; if not, it runs without from now on."""
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
        """Return further arguments of source and target: positions, and the cache in the numbering of each half."""
        both: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        past, new = None if cache is None else past_of(cache), 0 if input_ids is None else input_ids.shape[1]
        numbered = self._layers or (None, None)
        counted = zip(self._counts_from_padding, self._positioned, strict=True)
        halves = list(zip(both, (self.source, self.target), numbered, counted, strict=True))
        first, apart = 0, isinstance(self.source, PrefixFront)
        for options, half, layers, (from_padding, positioned) in reversed(halves) if apart else halves:
            own = apart and half is self.source  # it has positions and a mask of its own tokens
            if positioned:
                if position_ids is not None:
                    options["position_ids"] = position_ids
                    if mask is None and cache is None and takes(half.model, MASK):
                        options[MASK] = None  # with a mask, texts that are packed into one row would attend to another
                elif input_ids is not None and not from_padding and mask is not None and mask.dim() == 2:
                    options["position_ids"] = positions_of(mask)[:, -new:]
                elif past is not None and input_ids is not None and not from_padding:
                    options["position_ids"] = (torch.arange(new, device=input_ids.device) + past)[None]
            if cache is not None and layers is not None:
                view = shown(cache, first, layers, past)
                options |= {cache_argument(half.model): view, "use_cache": bool(layers)}
                first += len(layers)
                if not own:  # the representation has the mask of the new tokens only, which suffices for states
                    states = view is not None and mask is not None and has_no_attention(view.layers)
                    options["attention_mask"] = mask[:, -new:] if states and mask is not None else mask
        return both

    @property
    def _positioned(self) -> tuple[bool, bool]:
        """Whether each half takes the positions of the tokens of the target."""
        source, target = (
            any(half.model._positioned) if isinstance(half.model, StitchedModelForCausalLM)
            else takes(half.model, "position_ids") and not (from_padding and self._layers is None)
            for half, from_padding in zip((self.source, self.target), self._counts_from_padding, strict=True)
        )  # fmt: skip
        return source and not isinstance(self.source, PrefixFront), target

    def _check_generates(self) -> None:
        """Raise an error if the target alone generates from other tokens than a stitched model passes to it."""
        network: Any = self
        while isinstance(network, StitchedModel):
            network = network.target.model
        given = torch.full((1, 2), self.target.interface.filler_id)
        prepare = getattr(network, "prepare_inputs_for_generation", None)
        read = given if prepare is None else prepare(given).get("input_ids", given)
        if more := read.shape[1] - given.shape[1]:
            raise ValueError(
                f"the target, {type(network).__name__}, appends {more} token{'s'[: more > 1]} to the text when it "
                "generates and predicts in their place, which a source does not read: take the logits of forward"
            )

    def _check_used(self, position_ids: Tensor | None) -> None:
        if position_ids is not None and not any(self._positioned):
            raise ValueError(
                f"neither network ({type(self.source.model).__name__}, {type(self.target.model).__name__}) uses "
                "position_ids: leave it out"
            )

    def generate(
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Generate text, as any language model of transformers.

        A model without a cache runs over the whole text for each token; a warning names the reason (:attr:`uncached`).

        Args:
            inputs: (batch, tokens) int64, the texts to continue.
            generation_config: Settings. Default: :attr:`generation_config`.
            *args: As for the method of transformers.
            **kwargs: As for the method of transformers.
        """
        if self.source.takes.given:
            raise ValueError(
                f"the source also reads {', '.join(self.source.takes.given)}, which generation does not pass: stitch "
                "its encoder alone (hf_stitch.load(…, task='text-encoding'))"
            )
        self._check_generates()
        self._check_used(kwargs.get("position_ids"))
        kwargs = by_one_name(kwargs, NAME, callers=2)
        settings = generation_config or self.generation_config
        wanted = kwargs.get("use_cache", settings.use_cache)
        if wanted is not False:
            self._check_cache()
            if (why := self.uncached) is not None:
                if kwargs.get("use_cache") or kwargs.get(NAME) is not None:
                    self._joint_cache(kwargs.get(NAME), True)  # raises
                warn(f"each token takes a run over the whole text, because {why}")
                if generation_config is None:
                    kwargs["use_cache"] = False
                else:
                    generation_config = copy.deepcopy(generation_config)
                    generation_config.use_cache = False
        for name in AHEAD if isinstance(self.source, PrefixFront) else ():
            if kwargs.get(name) is not None or getattr(settings, name, None) is not None:
                raise ValueError(
                    f"{name} is not supported for networks with different tokenizers, whose caches have different "
                    "lengths: leave it out"
                )
        generated: Any = super().generate
        return generated(inputs, generation_config, *args, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the inputs of a step of generation; with two tokenizers, also what the source reads.

        Args:
            input_ids: (batch, tokens) int64, all tokens so far.
            next_sequence_length: Number of last tokens that are not in the cache; ``None`` for all.
            **kwargs: As for the method of transformers, which looks for this name.
        """
        prepare: Any = super().prepare_inputs_for_generation
        inputs: dict[str, Any] = prepare(input_ids, next_sequence_length=next_sequence_length, **kwargs)
        if not any(self._positioned):
            inputs.pop("position_ids", None)
        if isinstance(self.source, PrefixFront):
            cache, layers = given_cache(kwargs), self._layers
            held = cache.get_seq_length(len(layers[1])) if cache is not None and layers else None
            reading = self.source.read(input_ids, kwargs.get("attention_mask"), next_sequence_length, held)
            inputs |= reading.to_inputs()
        return inputs

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None, **_: Any) -> Tensor | None:
        """Return the (batch, tokens) mask unchanged, because each half converts it for its own attention.

        Args:
            attention_mask: (batch, tokens), 1 for real tokens and 0 for padding.
            **_: Other arguments that transformers passes; ignored.
        """
        return attention_mask

    def _with_head(self, output: Any, labels: Tensor | None) -> CausalLMOutputWithPast:
        logits = logits_of(output)
        return CausalLMOutputWithPast(loss=_loss(logits, labels), logits=logits, **seen_in(output))


def _loss(
    logits: Tensor, labels: Tensor | None, ahead: Tensor | None = None, items: int | Tensor | None = None
) -> Tensor | None:
    """Return the mean cross-entropy of the next tokens, or their sum divided by a number; ``None`` without labels."""
    if ahead is None:
        if labels is None:
            return None
        logits, ahead = logits[:, :-1], labels[:, 1:]
    logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    ahead = ahead.flatten().to(logits.device)
    loss = functional.cross_entropy(logits, ahead, ignore_index=-100, reduction="mean" if items is None else "sum")
    return loss if items is None else loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


class Backbone:
    """What ``base_model`` is of any language model: returns hidden states, of which its last layer makes the logits.

    TRL computes its losses from both. A model that scales or caps its logits afterwards is refused, because its logits
    would be others.
    """

    _tp_plan = _pp_plan = None

    def __init__(self, model: StitchedModelForCausalLM) -> None:
        self._of = model

    def __call__(self, *args: Any, **inputs: Any) -> BaseModelOutput:
        """Run the model and return what enters its last layer."""
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        head: Any = self._of.get_output_embeddings()
        hook = head.register_forward_hook(lambda _, given, logits: kept.append((given[0], logits)))
        try:
            output = type(self._of).forward(
                self._of, *args, **inputs | {"return_dict": True}
            )  # TRL replaces that of the object
        finally:
            hook.remove()
        states, logits = kept[-1]
        if not torch.allclose(logits.to(output.logits), output.logits, rtol=0, atol=0, equal_nan=True):
            raise ValueError(
                f"the target, {type(self._of.target.model).__name__}, changes the outputs of its last layer (it scales "
                "or caps them), so that they are not the logits: train it with the Trainer of transformers"
            )
        return BaseModelOutput(last_hidden_state=states, **seen_in(output))
