"""Adapter and front half of a decoder that, at each token of a second tokenizer, reads the text up to its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from hf_stitch.adapters.base import Adapter, LayerCallback
from hf_stitch.adapters.cutting.cut import Cut, CutPlan
from hf_stitch.adapters.cutting.halves import Front, Observed, copy_without, hollow
from hf_stitch.adapters.cutting.interface import POSITIONS, Interface
from hf_stitch.adapters.discovery.survey import Survey
from hf_stitch.adapters.examples import arguments_of
from hf_stitch.adapters.prefixes.reading import INPUTS, PrefixReader, Reading, fast, tree
from hf_stitch.adapters.preprocess import place_of
from hf_stitch.data import Samples
from hf_stitch.reference import ModelReference
from hf_stitch.representation import Representation, RepresentationSpec

__all__ = ["PrefixAdapter", "PrefixFront"]

TOLERANCE = {True: 1e-4, False: 3e-2}
"""Whether activations have 32 bits or more -> largest difference between a forward over all prefixes and separate
forwards, relative to the largest activation. The rounding error is 1e-6 in float32 and 1e-2 in bf16."""

WINDOWS = (
    *("sliding_window", "attention_chunk_size", "attention_window", "attention_window_size"),
    *("local_attention_window_len", "keep_window_size", "index_topk"),
)
"""Keys of configs that limit the distance or number of tokens of the attention."""


class PrefixAdapter(Adapter):
    """Run a decoder on the tokens of a second decoder: at each token, it reads the text up to the end of the token.

    The adapter accepts the inputs of the target and has the layers of the source. All prefixes of a text run in one
    forward of the source, as branches where their tokens differ from the tokens of the whole text. Activations do not
    depend on later characters, so generation with a stitched model is consistent with a forward over the final text.
    ``hf_stitch.stitch(…, align="prefix")`` creates this adapter.

    Args:
        source: The decoder that runs.
        target: The network that defines the tokens.
        own: Whether to append the target's embedding of each token to the activations of the source. Without it, a map
            cannot determine the token of the target where the two tokenizers split text differently.

    Example:
        >>> import hf_stitch
        >>> from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        >>> from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
        >>> def decoder(width, *pieces):
        ...     words = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(["?", *pieces])}, unk_token="?"))
        ...     words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
        ...     config = GPT2Config(
        ...         vocab_size=1 + len(pieces), n_embd=width, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        ...     )
        ...     tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="?", pad_token="?")
        ...     return hf_stitch.load(GPT2LMHeadModel(config).eval(), processor=tokenizer)
        >>> a, b = decoder(8, "walking", "walk", "a"), decoder(12, "a", "walk", "##ing")
        >>> adapter = PrefixAdapter(a, b, own=True)
        >>> reading = adapter.reader.read(adapter.preprocess(["a walking"])["input_ids"])
        >>> reading.input_ids.tolist(), reading.alignment.tolist()  # "a", "a walk", "a walking"
        ([[3, 2, 1]], [[0, 1, 2]])
        >>> adapter.encode(adapter.preprocess(["a walking"]), "transformer.h.0")["transformer.h.0"].values.shape
        torch.Size([1, 3, 20])
    """

    completes = False

    def __init__(self, source: Adapter, target: Adapter, *, own: bool = False) -> None:
        for side, network in (("source", source), ("target", target)):
            if network.interface.modality != "text":
                raise ValueError(
                    f"align='prefix' requires networks of texts, got {network.interface.modality} ({side})"
                )
        if source.library == "hf_stitch":
            raise ValueError("the source of align='prefix' must not be a stitched model: pass one of its networks")
        _check_attention(source.model)
        super().__init__(
            source.model, source._library, target.interface, target.example, source.reference, target.processor
        )
        self.source, self._target = source, target
        self.interface = target.interface
        self.start = _start_token(source)
        self.reader = PrefixReader(
            fast(source.processor, "source"), fast(target.processor, "target"), self.start, source.interface.max_tokens
        )
        self.own = _token_embedding(target) if own else None
        self.embedding_width = 0 if self.own is None else self.own.embedding_dim
        _check_branches(self)

    # -- from the source ----------------------------------------------------------------------
    @property
    def task(self) -> str | None:
        """Task of the source."""
        return self.source.task

    @property
    def pinned(self) -> ModelReference:
        """The reference of the source with everything that determines its outputs: weights, config and tokenizer."""
        return self.source.pinned

    def module_name(self, layer: str) -> str:
        """Return the name of the module at a layer of the source."""
        return self.source.module_name(layer)

    def layer_name(self, module: str) -> str:
        """Return the layer name of a module of the source."""
        return self.source.layer_name(module)

    def _survey(self, inputs: Mapping[str, Any] | None = None) -> Survey:
        """Return the survey of the source on the tokens of its tokenizer: cuts do not depend on the tokens."""
        return self.source._survey()

    def _padded(self) -> Interface:
        self.interface = self._target._padded()
        return self.interface

    def check_lengths(self, samples: Samples) -> None:
        """Raise a ``ValueError`` for the first text that is too long for the source."""
        limit = self.reader.max_tokens
        if limit is None:
            return
        for batch in samples.batches(256):
            ids, mask, _, _ = split(self.inputs(self.preprocess(batch.samples)), self.interface)
            masks = torch.ones_like(ids) if mask is None else mask
            for id_, tokens, real in zip(batch.ids, ids, masks.bool(), strict=True):
                if (count := self.reader.length(tokens[real].tolist())) > limit:
                    raise ValueError(
                        f"sample {id_!r} must have at most {limit} tokens in the tokenizer of the source, got {count}: "
                        "shorten or remove it"
                    )

    # -- reading -------------------------------------------------------------------------------
    def spec(self, layer: str) -> RepresentationSpec:
        """Return the spec at a layer of the source; ``own`` adds the width of the target's embedding."""
        cut = self._survey().cut(self.module_name(layer))
        if cut.spec.layout != "bnd" or cut.spec.prefix_tokens or cut.padding != "masked":
            raise ValueError(
                f"align='prefix' requires a layer with a vector at each token, but layer {layer!r} of the source "
                f"outputs {cut.spec}: choose one of its blocks"
            )
        return dataclasses.replace(cut.spec, width=cut.spec.width + (self.own.embedding_dim if self.own else 0))

    def encode(self, inputs: Any, layers: str | Iterable[str]) -> dict[str, Representation]:
        """Run the source and return its activations at each token of the target."""
        names = [layers] if isinstance(layers, str) else list(layers)
        for name in names:
            self.cut(name)
        representations: dict[str, Representation] = {}
        self.run_with_callback(inputs, names, representations.__setitem__)
        return {name: representations[name] for name in names}

    def run_with_callback(
        self, inputs: Any, layers: Iterable[str], callback: LayerCallback, *, complete: bool = False
    ) -> Any:
        """Run the source once, and call a function with the activations at each token of the target."""
        if complete:
            raise ValueError("the source does not output tokens of the target: leave out complete=True")
        ids, mask, reading, _ = split(self.inputs(inputs), self.interface)
        reading_inputs = self.reader.read(ids, mask).to_inputs() if reading is None else reading

        def call_at_tokens(name: str, representation: Representation) -> None:
            callback(name, gather_at_tokens(representation, reading_inputs["alignment"], ids, mask, self.own))

        self.source.run_branches(arguments(reading_inputs, place_of(self.model)[1]), layers, call_at_tokens)

    def forward(self, inputs: Any) -> Any:
        """Raise an error: the source does not output tokens of the target."""
        raise ValueError("the source does not output tokens of the target: run the source, adapter.source")

    def decode(self, representation: Representation, layer: str) -> Any:
        """Raise an error, like :meth:`forward`."""
        raise ValueError("the source does not output tokens of the target: run the source, adapter.source")

    def front(self, layer: str) -> PrefixFront:
        """Return the part of the source up to a cut as a separate module. See :meth:`hf_stitch.Adapter.front`."""
        cut, plan = self.cut(layer)
        replacements = {name: hollow(self.model.get_submodule(name)) for name in plan.after}
        model = copy_without(self.model, replacements)
        weight = None if self.own is None else self.own.weight.detach().clone()
        embedding = None if weight is None else nn.Embedding.from_pretrained(weight, freeze=False)
        front = PrefixFront(model, cut, plan, self.source.interface, self.interface, self.start, embedding)
        front.attach(self.reader.source, self.reader.target)
        return front


def _start_token(source: Adapter) -> int:
    """Return the token that a decoder reads for an empty text."""
    config, tokenizer = getattr(source.model, "config", None), source.processor
    for owner in (tokenizer, config):
        for name in ("bos_token_id", "eos_token_id"):
            token = getattr(owner, name, None)
            if isinstance(token, int):
                return token
    raise ValueError(
        "the source requires a token for the start or end of a text to read an empty text: set bos_token in its "
        "tokenizer"
    )


def _token_embedding(target: Adapter) -> nn.Embedding:
    embedding = getattr(target.model, "get_input_embeddings", lambda: None)()
    if not isinstance(embedding, nn.Embedding):
        raise ValueError(
            f"own=True requires a token embedding of the target, which {type(target.model).__name__} lacks: set it to "
            "False"
        )
    if embedding.weight.is_meta:
        raise ValueError(
            "own=True copies the token embedding of the target, which must not be offloaded: keep it on a device "
            "(device_map={'…embed_tokens': 'cpu', …}), or leave out own"
        )
    return nn.Embedding.from_pretrained(embedding.weight.detach().clone())


def _check_attention(model: nn.Module) -> None:
    """Raise an error if the layers of a decoder create their own masks, which this adapter would override."""
    config: Any = getattr(model, "config", None)
    text_config: Any = None if config is None else config.get_text_config(decoder=True)
    types = getattr(text_config, "layer_types", None)
    special = sorted({*(types or ()), *getattr(text_config, "attention_layers", ())} - {"full_attention", "global"})
    layers = list(text_config.per_layer_config) if hasattr(type(text_config), "per_layer_config") else [text_config]
    windows = [] if types else [n for n in WINDOWS if any(getattr(layer, n, None) is not None for layer in layers)]
    if special or windows:
        raise ValueError(
            f"align='prefix' replaces the attention mask of the source, but {type(model).__name__} requires special "
            f"masks ({', '.join((*special, *windows))}): use a source with full attention in all layers"
        )


@torch.no_grad()
def _check_branches(adapter: PrefixAdapter) -> None:
    """Raise an error unless one forward over several branches of a text matches separate forwards."""
    model, layer = adapter.model, adapter.source.candidates[-1]
    if "position_ids" not in arguments_of(model, "input_ids"):
        raise ValueError(f"align='prefix' requires a source that accepts position_ids, got {type(model).__name__}")
    size = adapter.reader.source.get_vocab_size()
    ids = torch.randint(size, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    prefixes = [ids[:1], ids[:4], [*ids[:4], *ids[12:14]], ids[:8], [*ids[:8], ids[14]], ids[:12], [ids[15], *ids[:6]]]
    reading = tree(prefixes, adapter.device)
    in_tree: dict[str, Tensor] = {}
    inputs = arguments(reading.to_inputs(), place_of(model)[1])
    try:
        adapter.source.run_branches(inputs, [layer], lambda name, r: in_tree.update({name: r.values.clone()}))
    except Exception as cause:  # libraries raise any exception for a mask that they do not accept
        raise ValueError(
            f"align='prefix' requires a decoder that accepts a mask of queries by keys; {type(model).__name__} raised "
            f"{type(cause).__name__}: {cause}"
        ) from cause
    for node, tokens in zip(reading.alignment[0].tolist(), prefixes, strict=True):
        alone = adapter.source.encode({"input_ids": torch.tensor([tokens], device=adapter.device)}, layer)[layer].values
        activations = in_tree[layer][0, node]
        error = float((activations - alone[0, -1]).abs().max() / alone.abs().max())
        if not error < TOLERANCE[activations.dtype.itemsize >= 4]:
            raise ValueError(
                f"align='prefix' requires a decoder that runs several branches of a text in one forward, but the "
                f"activations of {type(model).__name__} change by {error:.1e} of the largest: it is not a decoder, or "
                "overrides the attention mask. Compare the two with align='offsets' (hf_stitch.compare)"
            )


class PrefixFront(Front):
    """The part of a decoder up to a cut, for the tokens of a target with another tokenizer.

    At each token of the target, it outputs the activations of the decoder for the text up to the end of the token,
    followed by the embedding of the token in the target if ``own`` is set. See
    :class:`~hf_stitch.adapters.prefixes.PrefixReader`. Create it with :meth:`PrefixAdapter.front`.

    Args:
        model: Copy of the decoder; it becomes part of this module and is changed.
        cut: Cut at the end of the part.
        plan: Verified plan with the modules to replace.
        interface: Interface of the decoder.
        takes: Interface of the target.
        start: Token that the decoder reads for an empty text.
        own: Token embedding of the target. Default: none.

    Attributes:
        reader: Converts tokens of the target; ``None`` without both tokenizers, if forwards receive a reading.

    Example:
        >>> import hf_stitch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
        >>> network = hf_stitch.load(GPT2LMHeadModel(config).eval())
        >>> cut, plan = network.cut("transformer.h.0")
        >>> front = PrefixFront(network.model, cut, plan, network.interface, network.interface, start=0)
        >>> reading = Reading(
        ...     torch.tensor([[3, 5, 7]]), torch.ones(1, 1, 3, 3).tril().bool(), torch.tensor([[0, 1, 2]]),
        ...     torch.tensor([[0, 2]]), torch.tensor([[0, 1, 2]]),
        ... )
        >>> front(input_ids=torch.tensor([[4, 9]]), **reading.to_inputs()).values.shape
        torch.Size([1, 2, 8])
    """

    def __init__(
        self, model: nn.Module, cut: Cut, plan: CutPlan, interface: Interface, takes: Interface, start: int,
        own: nn.Embedding | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, cut, plan, interface)
        self._takes, self.start, self.own = takes, start, own
        self.reader: PrefixReader | None = None

    @property
    def takes(self) -> Interface:
        """Interface of this half: the interface of the target."""
        return self._takes

    def record(self) -> dict[str, Any]:
        """Return the JSON values that, in addition to the record of a half, are required to build this half."""
        sizes = None if self.own is None else [self.own.num_embeddings, self.own.embedding_dim]
        return {"start": self.start, "own": sizes}

    def attach(self, source: Tokenizer, target: Tokenizer) -> None:
        """Set both tokenizers of this half."""
        self.reader = PrefixReader(source, target, self.start, self.interface.max_tokens)

    def read(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, new: int | None = None, held: int | None = None
    ) -> Reading:
        """Compute the tokens that the decoder reads; see :meth:`PrefixReader.read`."""
        if self.reader is None:
            raise ValueError(
                f"without both tokenizers, inputs must contain the tokens of the source: pass {', '.join(INPUTS)}"
            )
        return self.reader.read(input_ids, attention_mask, new, held)

    def forward(self, seen: Observed | None = None, /, **inputs: Any) -> Tensor:
        """Compute the values at the cut for each token of the target."""
        ids, mask, reading, options = split(inputs, self.takes)
        if reading is None:
            reading = self.read(ids, mask).to_inputs()
        decoder_inputs = arguments(reading, place_of(self.model)[1]) | options
        representation = super()._represent(super().forward(seen, **decoder_inputs), decoder_inputs)
        return gather_at_tokens(representation, reading["alignment"], ids, mask, self.own).values

    def _represent(self, values: Tensor, inputs: Mapping[str, Any]) -> Representation:
        ids, mask, _, _ = split(inputs, self.takes)
        return Representation(values, "bnd", mask=real_tokens(ids, mask).to(values.device))


def split(
    inputs: Mapping[str, Any], interface: Interface
) -> tuple[Tensor, Tensor | None, dict[str, Tensor] | None, dict[str, Any]]:
    """Split inputs into ids, mask, the tensors of a reading, and further arguments."""
    options = {name: value for name, value in inputs.items() if value is not None}
    ids, mask = options.pop(interface.content[0]), options.pop(interface.mask, None)
    for name in ("token_type_ids", POSITIONS):
        options.pop(name, None)
    reading = {name: options.pop(name) for name in INPUTS if name in options}
    required = set(INPUTS) - {"source_kept"}
    if reading and (missing := sorted(required - reading.keys())):
        raise ValueError(f"inputs of the source lack {', '.join(missing)}: pass all inputs of the source, or none")
    return ids, mask, reading or None, options


def arguments(reading: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a reading as arguments of the decoder; the mask is added to its attention logits."""
    visible = reading["source_attention_mask"].bool()
    lowest = torch.finfo(dtype).min
    return {
        "input_ids": reading["source_input_ids"],
        "attention_mask": torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, lowest),
        "position_ids": reading["source_position_ids"],
    }


def gather_at_tokens(
    representation: Representation, alignment: Tensor, ids: Tensor, mask: Tensor | None, embedding: nn.Embedding | None
) -> Representation:
    """Gather the activations at each token of the target, and append its ``embedding`` of the token, if any."""
    values = representation.values.gather(1, alignment[..., None].expand(-1, -1, representation.values.shape[-1]))
    if embedding is not None:
        values = torch.cat([values, embedding(ids).to(values.dtype)], -1)
    return Representation(values, "bnd", mask=real_tokens(ids, mask))


def real_tokens(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return a mask of the tokens that are not padding; ``mask`` may also cover past tokens."""
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[:, -ids.shape[1] :].bool()
