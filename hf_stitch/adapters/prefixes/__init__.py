"""Networks that, at each token of a second tokenizer, read the text up to the end of the token."""

from hf_stitch.adapters.prefixes.adapter import PrefixAdapter, PrefixFront
from hf_stitch.adapters.prefixes.reading import INPUTS, PrefixReader, Reading, fast

__all__ = ["INPUTS", "PrefixAdapter", "PrefixFront", "PrefixReader", "Reading", "fast"]
