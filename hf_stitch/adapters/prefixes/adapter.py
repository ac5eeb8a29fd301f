"""Adapter and front half of a decoder that reads at each token of another tokenizer the text up to its end."""

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
"""Largest difference between activations of one forward over all prefixes and of a forward over each, relative to the
largest activation, in float32 and above, and in half precision. Rounding makes 1e-6 in float32, and 1e-2 in bf16."""

WINDOWS = (
    *("sliding_window", "attention_chunk_size", "attention_window", "attention_window_size"),
    *("local_attention_window_len", "keep_window_size", "index_topk"),
)
"""Keys of configs that bound how far, or to how many tokens, a token attends."""


class PrefixAdapter(Adapter):
    """Run a decoder on the tokens of another one: at each of them, it reads the text up to its end.

    The adapter takes the inputs of the target, and its layers are those of the source. All prefixes of a text run in
    one forward of the source, as branches where the tokens of a prefix are not those of the whole text. No activation
    depends on a later character, so that stitched models generate what a forward over the final text computes.
    ``hf_stitch.stitch(…, align="prefix")`` creates this adapter.

    Args:
        source: The decoder that runs.
        target: The network whose tokens are read.
        own: Whether the embedding of each token in the target is appended to the activations of the source. A map from
            the source alone does not know which token it is that the target has read, where tokens are cut differently.

    Example:
        >>> import hf_stitch
        >>> from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        >>> from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
        >>> def decoder(width, *pieces):
        ...     made = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(["?", *pieces])}, unk_token="?"))
        ...     made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
        ...     config = GPT2Config(
        ...         vocab_size=1 + len(pieces), n_embd=width, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        ...     )
        ...     tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="?", pad_token="?")
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
        for side, each in (("source", source), ("target", target)):
            if each.interface.modality != "text":
                raise ValueError(f"align='prefix' reads texts, but the {side} takes {each.interface.modality} samples")
        if source.library == "hf_stitch":
            raise ValueError("the source of align='prefix' is a stitched model itself: pass one of its networks")
        _check_attention(source.model)
        super().__init__(
            source.model, source._library, target.interface, target.example, source.reference, target.processor
        )
        self.source, self._target = source, target
        self.interface = target.interface
        self.start = _start(source)
        self.reader = PrefixReader(
            fast(source.processor, "source"), fast(target.processor, "target"), self.start, source.interface.max_tokens
        )
        self.own = _embedding(target) if own else None
        self.embedding_width = 0 if self.own is None else self.own.embedding_dim
        _check_branches(self)

    # -- what is the source's ----------------------------------------------------------------------
    @property
    def task(self) -> str | None:
        """Task of the source."""
        return self.source.task

    @property
    def pinned(self) -> ModelReference:
        """The reference of the source, with what decides its outputs: weights (hash), config and its own tokenizer."""
        return self.source.pinned

    def module_name(self, layer: str) -> str:
        """Return the name of the module at a layer of the source."""
        return self.source.module_name(layer)

    def layer_name(self, module: str) -> str:
        """Return the name of a module of the source as a layer."""
        return self.source.layer_name(module)

    def _survey(self, inputs: Mapping[str, Any] | None = None) -> Survey:
        """Return the survey of the source on its own tokens: the cuts do not depend on what is read."""
        return self.source._survey()

    def _padded(self) -> Interface:
        self.interface = self._target._padded()
        return self.interface

    def check_lengths(self, samples: Samples) -> None:
        """Check that the source takes all texts; a ValueError names the first that is too long."""
        most = self.reader.max_tokens
        if most is None:
            return
        for batch in samples.batches(256):
            ids, mask, _, _ = split(self.inputs(self.preprocess(batch.samples)), self.interface)
            masks = torch.ones_like(ids) if mask is None else mask
            for id_, tokens, real in zip(batch.ids, ids, masks.bool(), strict=True):
                if (count := self.reader.length(tokens[real].tolist())) > most:
                    raise ValueError(
                        f"sample {id_!r} has {count} tokens in the tokenizer of the source, which takes {most}: "
                        "shorten it, or leave it out"
                    )

    # -- what is read -------------------------------------------------------------------------------
    def spec(self, layer: str) -> RepresentationSpec:
        """Return the spec at a layer: that of the source, wider by the embedding of the target if ``own``."""
        cut = self._survey().cut(self.module_name(layer))
        if cut.spec.layout != "bnd" or cut.spec.prefix_tokens or cut.padding != "masked":
            raise ValueError(
                f"align='prefix' reads a vector at each token, but layer {layer!r} of the source outputs {cut.spec}: "
                "choose a layer among its blocks"
            )
        return dataclasses.replace(cut.spec, width=cut.spec.width + (self.own.embedding_dim if self.own else 0))

    def encode(self, inputs: Any, layers: str | Iterable[str]) -> dict[str, Representation]:
        """Run the source and return its activations at each token of the target."""
        names = [layers] if isinstance(layers, str) else list(layers)
        for name in names:
            self.cut(name)
        found: dict[str, Representation] = {}
        self.run_with_callback(inputs, names, found.__setitem__)
        return {name: found[name] for name in names}

    def run_with_callback(
        self, inputs: Any, layers: Iterable[str], callback: LayerCallback, *, complete: bool = False
    ) -> Any:
        """Run the source once, and call a function with the activations at each token of the target."""
        if complete:
            raise ValueError("the source has no output at the tokens of the target: leave out complete=True")
        ids, mask, reading, _ = split(self.inputs(inputs), self.interface)
        given = self.reader.read(ids, mask).to_inputs() if reading is None else reading

        def read(name: str, found: Representation) -> None:
            callback(name, gathered(found, given["alignment"], ids, mask, self.own))

        self.source.run_branches(arguments(given, place_of(self.model)[1]), layers, read)

    def forward(self, inputs: Any) -> Any:
        """Refuse: the source has no output at the tokens of the target."""
        raise ValueError("the source has no output at the tokens of the target: run the source itself, adapter.source")

    def decode(self, representation: Representation, layer: str) -> Any:
        """Refuse, as :meth:`forward`."""
        raise ValueError("the source has no output at the tokens of the target: run the source itself, adapter.source")

    def front(self, layer: str) -> PrefixFront:
        """Return the part of the source up to a cut as a separate module. See :meth:`hf_stitch.Adapter.front`."""
        cut, plan = self.cut(layer)
        gone = {name: hollow(self.model.get_submodule(name)) for name in plan.after}
        copied = copy_without(self.model, gone)
        own = None if self.own is None else nn.Embedding.from_pretrained(self.own.weight.detach().clone(), freeze=False)
        front = PrefixFront(copied, cut, plan, self.source.interface, self.interface, self.start, own)
        front.attach(self.reader.source, self.reader.target)
        return front


def _start(source: Adapter) -> int:
    """Return the token of a decoder that stands for no text."""
    known, tokenizer = getattr(source.model, "config", None), source.processor
    for owner in (tokenizer, known):
        for name in ("bos_token_id", "eos_token_id"):
            token = getattr(owner, name, None)
            if isinstance(token, int):
                return token
    raise ValueError(
        "the source has no token for the begin or the end of a text, and could read nothing at the first token of the "
        "target: set bos_token in its tokenizer"
    )


def _embedding(target: Adapter) -> nn.Embedding:
    found = getattr(target.model, "get_input_embeddings", lambda: None)()
    if not isinstance(found, nn.Embedding):
        raise ValueError(
            f"own=True takes the token embedding of the target, and {type(target.model).__name__} has none: set it to "
            "False"
        )
    if found.weight.is_meta:
        raise ValueError(
            "own=True copies the token embedding of the target, which is offloaded: keep it on a device "
            "(device_map={'…embed_tokens': 'cpu', …}), or leave own out"
        )
    return nn.Embedding.from_pretrained(found.weight.detach().clone())


def _check_attention(model: nn.Module) -> None:
    """Check that no layer of a decoder has a mask of its own: it would not be used."""
    config: Any = getattr(model, "config", None)
    known: Any = None if config is None else config.get_text_config(decoder=True)
    types = getattr(known, "layer_types", None)
    others = sorted({*(types or ()), *getattr(known, "attention_layers", ())} - {"full_attention", "global"})
    layers = list(known.per_layer_config) if hasattr(type(known), "per_layer_config") else [known]
    windows = [] if types else [n for n in WINDOWS if any(getattr(layer, n, None) is not None for layer in layers)]
    if others or windows:
        raise ValueError(
            f"align='prefix' makes the attention mask of the source, and {type(model).__name__} has layers with masks "
            f"of their own ({', '.join((*others, *windows))}), which would not be used: take a source whose layers "
            "attend to the whole text"
        )


@torch.no_grad()
def _check_branches(adapter: PrefixAdapter) -> None:
    """Check that one forward over several branches of a text computes what a forward over each does."""
    model, layer = adapter.model, adapter.source.candidates[-1]
    if "position_ids" not in arguments_of(model, "input_ids"):
        raise ValueError(
            f"align='prefix' gives positions to the source, but {type(model).__name__} takes no position_ids"
        )
    size = adapter.reader.source.get_vocab_size()
    ids = torch.randint(size, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    prefixes = [ids[:1], ids[:4], [*ids[:4], *ids[12:14]], ids[:8], [*ids[:8], ids[14]], ids[:12], [ids[15], *ids[:6]]]
    reading = tree(prefixes, adapter.device)
    together: dict[str, Tensor] = {}
    given = arguments(reading.to_inputs(), place_of(model)[1])
    try:
        adapter.source.run_branches(given, [layer], lambda name, found: together.update({name: found.values.clone()}))
    except Exception as cause:  # libraries raise any exception for a mask that they do not take
        raise ValueError(
            f"align='prefix' needs a decoder that takes a mask of queries by keys; {type(model).__name__} raised "
            f"{type(cause).__name__}: {cause}"
        ) from cause
    for node, tokens in zip(reading.alignment[0].tolist(), prefixes, strict=True):
        alone = adapter.source.encode({"input_ids": torch.tensor([tokens], device=adapter.device)}, layer)[layer].values
        own = together[layer][0, node]
        error = float((own - alone[0, -1]).abs().max() / alone.abs().max())
        if not error < TOLERANCE[own.dtype.itemsize >= 4]:
            raise ValueError(
                f"align='prefix' needs a decoder that runs several branches of a text in one forward, but "
                f"{type(model).__name__} computes other activations then (by {error:.1e} of the largest): it is no "
                "decoder, or makes its own attention mask. Compare the two with align='offsets' (hf_stitch.compare)"
            )


class PrefixFront(Front):
    """The part of a decoder up to a cut, which takes the tokens of another tokenizer.

    At each of them it outputs the activations of the decoder for the text up to the end of that token, and after them
    the embedding of the token itself in the other network if ``own`` is given. See
    :class:`~hf_stitch.adapters.prefixes.PrefixReader`. :meth:`PrefixAdapter.front` returns one.

    Args:
        model: Copy of the decoder; it becomes part of this module and is changed.
        cut: Cut at which the part ends.
        plan: Verified plan with the modules to replace.
        interface: How the decoder takes its input.
        takes: How the network of the other tokenizer takes its input.
        start: Token of the decoder that stands for no text.
        own: Token embedding of that network. Default: none.

    Attributes:
        reader: Computes what the decoder reads; ``None`` without both tokenizers, if that is given to each forward.

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
        """How this half takes its input: as the network of the other tokenizer."""
        return self._takes

    def record(self) -> dict[str, Any]:
        """Return as JSON values what beside the record of a half is needed to build this one."""
        own = None if self.own is None else [self.own.num_embeddings, self.own.embedding_dim]
        return {"start": self.start, "own": own}

    def attach(self, source: Tokenizer, target: Tokenizer) -> None:
        """Give both tokenizers to this half."""
        self.reader = PrefixReader(source, target, self.start, self.interface.max_tokens)

    def read(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, new: int | None = None, held: int | None = None
    ) -> Reading:
        """Compute what the decoder reads; see :meth:`PrefixReader.read`."""
        if self.reader is None:
            raise ValueError(
                f"both tokenizers are missing, so that the tokens of the source must be given: pass {', '.join(INPUTS)}"
            )
        return self.reader.read(input_ids, attention_mask, new, held)

    def forward(self, seen: Observed | None = None, /, **inputs: Any) -> Tensor:
        """Compute the values at the cut for each token of the other tokenizer."""
        ids, mask, reading, options = split(inputs, self.takes)
        if reading is None:
            reading = self.read(ids, mask).to_inputs()
        given = arguments(reading, place_of(self.model)[1]) | options
        found = super()._represent(super().forward(seen, **given), given)
        return gathered(found, reading["alignment"], ids, mask, self.own).values

    def _represent(self, values: Tensor, inputs: Mapping[str, Any]) -> Representation:
        ids, mask, _, _ = split(inputs, self.takes)
        return Representation(values, "bnd", mask=real_tokens(ids, mask).to(values.device))


def split(
    inputs: Mapping[str, Any], interface: Interface
) -> tuple[Tensor, Tensor | None, dict[str, Tensor] | None, dict[str, Any]]:
    """Divide inputs into ids, mask, the tensors of a reading, and further arguments."""
    others = {name: value for name, value in inputs.items() if value is not None}
    ids, mask = others.pop(interface.content[0]), others.pop(interface.mask, None)
    for name in ("token_type_ids", POSITIONS):
        others.pop(name, None)
    reading = {name: others.pop(name) for name in INPUTS if name in others}
    needed = set(INPUTS) - {"source_kept"}
    if reading and (missing := sorted(needed - reading.keys())):
        raise ValueError(f"inputs of the source lack {', '.join(missing)}: give all of them, or none")
    return ids, mask, reading or None, others


def arguments(reading: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a reading as arguments of the decoder; the mask is a number to add to its logits."""
    attends = reading["source_attention_mask"].bool()
    least = torch.finfo(dtype).min
    return {
        "input_ids": reading["source_input_ids"],
        "attention_mask": torch.zeros(attends.shape, dtype=dtype, device=attends.device).masked_fill(~attends, least),
        "position_ids": reading["source_position_ids"],
    }


def gathered(
    found: Representation, alignment: Tensor, ids: Tensor, mask: Tensor | None, own: nn.Embedding | None
) -> Representation:
    """Take the activations that each token of the other tokenizer reads; an ``own`` embedding of it is appended."""
    values = found.values.gather(1, alignment[..., None].expand(-1, -1, found.values.shape[-1]))
    if own is not None:
        values = torch.cat([values, own(ids).to(values.dtype)], -1)
    return Representation(values, "bnd", mask=real_tokens(ids, mask))


def real_tokens(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return which of the tokens are no padding; a mask may cover the past too."""
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[:, -ids.shape[1] :].bool()
