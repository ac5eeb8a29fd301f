"""Networks that read at each token of another tokenizer the text up to its end."""

from hf_stitch.adapters.prefixes.adapter import PrefixAdapter, PrefixFront
from hf_stitch.adapters.prefixes.reading import INPUTS, PrefixReader, Reading, fast

__all__ = ["INPUTS", "PrefixAdapter", "PrefixFront", "PrefixReader", "Reading", "fast"]
