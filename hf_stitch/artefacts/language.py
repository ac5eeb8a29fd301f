"""Stitched models whose target predicts the next token."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from hf_stitch.artefacts.cache import decoder_layers, layer_types, shown, sliding_window, takes
from hf_stitch.artefacts.configuration import StitchConfig
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.artefacts.outputs import logits_of


class StitchedModelForCausalLM(StitchedModel, GenerationMixin):  # type: ignore[misc]  # push_to_hub is ours
    """A stitched model whose target predicts the next token; returns a ``CausalLMOutputWithPast``.

    It generates as any language model of transformers does (``generate``), with a cache where both networks are
    decoders. Where the source sees the whole text at once (BERT, T5's encoder) every new token is a forward of its own.
    The ids that end or pad a text are the target's (``generation_config``).
    """

    task: ClassVar[str | None] = "text-generation"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"

    def __init__(self, config: StitchConfig, *parts: Any, **named: Any) -> None:
        """As the base class; what generation asks of a config is read off the halves."""
        super().__init__(config, *parts, **named)
        source: Any = self.source.model
        target: Any = self.target.model
        layers = decoder_layers(source), decoder_layers(target)
        self._layers = None if layers[0] is None or layers[1] is None else (layers[0], layers[1])
        if hasattr(target, "config"):
            config.vocab_size = target.config.get_text_config(decoder=True).vocab_size
        if hasattr(target, "generation_config"):
            self.generation_config = copy.deepcopy(target.generation_config)
        if self._layers is None:
            self.generation_config.use_cache = False
            return
        config.layer_types = layer_types(source, self._layers[0]) + layer_types(target, self._layers[1])
        config.num_hidden_layers = len(config.layer_types)
        windows = {sliding_window(half) for half in (source, target)}
        if len(windows) > 1:  # layers of a cache share one window: with two, all keep the whole past
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        config.sliding_window = windows.pop() if len(windows) == 1 else None

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **inputs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next tokens.

        Args:
            input_ids: (batch, tokens); with a cache, the tokens that are not in it.
            attention_mask: (batch, tokens), 1 where a token is real; with a cache, for the past as well.
            position_ids: (batch, tokens), for the halves that are decoders and take them; others number tokens by
                themselves.
            past_key_values: A cache of this model's own: ``DynamicCache()``, or what a forward returned.
            labels: (batch, tokens) token ids, -100 where none is asked for; shifted inside.
            use_cache: Start a cache where none is given.
            logits_to_keep: Compute this many of the last tokens' logits only (or those at these places); 0: all.
            **inputs: Further arguments of the source; ``return_dict=False`` for a tuple.

        Raises:
            ValueError: If a cache is asked for and one of the networks is no decoder.
        """
        named = {"input_ids": input_ids, "attention_mask": attention_mask, **inputs}
        named = {name: value for name, value in named.items() if value is not None}
        cache = self._cache(past_key_values, use_cache)
        before, after = self._options(cache, input_ids, position_ids)
        if cache is not None:
            after["attention_mask"] = attention_mask  # the representation knows that of the new tokens alone
        keeps = takes(self.target.model, "logits_to_keep")
        if keeps:
            after["logits_to_keep"] = logits_to_keep
        output = self.head(self.transfer(**named, **before), labels, **after)
        if not keeps and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            output.logits = output.logits[:, last]
        output.past_key_values = cache
        return output

    def _cache(self, given: Cache | None, use_cache: bool | None) -> Cache | None:
        if given is None and not use_cache:
            return None
        if self._layers is None:
            raise ValueError(
                "a cache needs a source and a target that are decoders with a cache, and one of them sees the whole "
                "text at once or keeps none: use_cache=False"
            )
        return DynamicCache(config=self.config) if given is None else given

    def _options(
        self, cache: Cache | None, input_ids: Tensor | None, position_ids: Tensor | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What source and target are told beside their input: positions, and the cache in numbers of their own."""
        both: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        if cache is not None and position_ids is None and input_ids is not None:
            past, new = cache.get_seq_length(), input_ids.shape[1]
            position_ids = (torch.arange(new, device=input_ids.device) + past)[None]
        first = 0
        for options, half, layers in zip(both, (self.source, self.target), self._layers or (None, None), strict=True):
            if layers is None:
                continue
            if position_ids is not None and takes(half.model, "position_ids"):
                options["position_ids"] = position_ids
            if cache is not None:
                options["past_key_values"] = shown(cache, first, layers)
                options["use_cache"] = bool(layers)
                first += len(layers)
        return both

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None, **_: Any) -> Tensor | None:
        """The (batch, tokens) mask as it is: each half makes of it what its attention needs."""
        return attention_mask

    def _with_head(self, output: Any, labels: Tensor | None) -> CausalLMOutputWithPast:
        logits = logits_of(output)
        loss = None
        if labels is not None:
            ahead = logits[:, :-1].flatten(0, 1)
            ahead = ahead.to(torch.promote_types(ahead.dtype, torch.float32))
            loss = functional.cross_entropy(ahead, labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
