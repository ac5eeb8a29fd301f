"""Checks of layers and networks before a job runs."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace

from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.interface import PROMPT
from hf_stitch.options import check
from hf_stitch.printing import see, warn
from hf_stitch.representation import Pooling


def layer_names(argument: str, layers: Iterable[str]) -> tuple[str, ...]:
    """Check a list of layer names and return it as a tuple."""
    check(Iterable[str], **{argument: layers})
    names = tuple(layers)
    if not names:
        raise ValueError(f"{argument} must contain at least one layer, got none")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{argument} contains {repeated[0]!r} more than once; name each layer once")
    return names


def check_comparable(source: Adapter, target: Adapter, pooling: Pooling) -> None:
    """Check that two networks accept the same kind of samples and, without pooling, the same tokens."""
    if source is not target and source.model is target.model and getattr(source.model, "peft_config", None):
        warn(
            f"both networks are the same {type(source.model).__name__}: PEFT adds its adapter to the base model in "
            "place. Load the base a second time"
        )
    kinds = source.interface.modality, target.interface.modality
    if kinds[0] != kinds[1]:
        raise ValueError(f"the networks must accept the same kind of samples, got {kinds[0]} and {kinds[1]}")
    prompt_a, prompt_b = source.interface.prefix, target.interface.prefix
    if pooling == "none" and PROMPT in target.interface.arguments and prompt_a != prompt_b:
        raise ValueError(
            f"the pooling of the target excludes its prompt, {prompt_b!r}, but the source has {prompt_a!r}: load "
            "both with the same prompt (prompts=, default_prompt_name=), or use pooling='mean', 'cls' or 'last'"
        )
    tokenizers = [a.processor for a in (source, target) if hasattr(a.processor, "get_vocab")]
    if pooling == "none" and len(tokenizers) == 2 and tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        if target.task == "text-generation":
            remedy = (
                "a stitched language model predicts every token. If both are decoders, use align='prefix' "
                "(hf_stitch.stitch): the source reads the text up to each token of the target. To compare the two, use "
                "align='offsets' (hf_stitch.compare), which matches pieces of text, or rows='mean'"
            )
        else:
            remedy = (
                "use pooling='mean', 'cls' or 'last' (hf_stitch.compare: rows=), which return one vector per sample; "
                "hf_stitch.compare also matches pieces of text, with rows='positions' and align='offsets'"
            )
        raise ValueError(
            f"the vocabularies of the two tokenizers differ, so token positions do not correspond: {remedy}"
            + see("other-tokens")
        )


def padded_alike(source: Adapter, target: Adapter) -> tuple[Adapter, Adapter]:
    """Return two networks that pad texts on the same side, if both accept one, so that token positions correspond.

    A network without padding sides groups texts by length, and is padded on the right. The adapters do not change.
    """
    sides_a, sides_b = (adapter._padded().sides or ("right",) for adapter in (source, target))
    common = tuple(side for side in sides_a if side in sides_b)

    def restricted(network: Adapter, sides: tuple[str, ...]) -> Adapter:
        if not common or len(sides) <= len(common):
            return network
        twin = copy.copy(network)
        twin.interface = replace(network.interface, sides=common)
        return twin

    return restricted(source, sides_a), restricted(target, sides_b)
