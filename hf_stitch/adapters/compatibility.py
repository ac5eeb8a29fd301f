"""Whether two networks can be shown the same samples, and their rows correspond."""

from __future__ import annotations

from hf_stitch.adapters.base import Adapter
from hf_stitch.representation import Pooling


def check_meet(source: Adapter, target: Adapter, pooling: Pooling) -> None:
    """Refuse two networks that no sample serves, or token by token two that cut texts differently.

    Raises:
        ValueError: Different modalities; different vocabularies under ``none``.
    """
    kinds = source.interface.modality, target.interface.modality
    if kinds[0] != kinds[1]:
        raise ValueError(f"the source takes {kinds[0]} and the target {kinds[1]} samples: no sample serves both")
    tokenizers = [a.processor for a in (source, target) if hasattr(a.processor, "get_vocab")]
    if pooling == "none" and len(tokenizers) == 2 and tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        raise ValueError(
            "the two tokenizers differ, so that token positions do not correspond: use pooling='mean', 'cls' or 'last', "
            "which give a sample one vector"
        )
