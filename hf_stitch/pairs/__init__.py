"""Pairs of networks, their samples, and the activations that matchers collect."""

from hf_stitch.pairs.collected import Collected, CollectedPair, CollectedParts
from hf_stitch.pairs.pair import Cell, Pair
from hf_stitch.pairs.split import Split

__all__ = ["Cell", "Collected", "CollectedPair", "CollectedParts", "Pair", "Split"]
