"""Two networks that meet: which run, what they read, and what matchers collect of them."""

from hf_stitch.pairs.collected import Collected, CollectedPair, CollectedParts
from hf_stitch.pairs.pair import Cell, Pair
from hf_stitch.pairs.split import Split

__all__ = ["Cell", "Collected", "CollectedPair", "CollectedParts", "Pair", "Split"]
