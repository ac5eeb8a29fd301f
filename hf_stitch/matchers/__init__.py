"""Matchers: configurations that fit a stitch between two representations."""

from hf_stitch.matchers.base import (
    ClosedFormMatcher,
    Matched,
    Matcher,
    NoAlignmentError,
    RowsMatcher,
    TrainedMatcher,
    UnpairedMatcher,
    match_each,
)

__all__ = [
    "ClosedFormMatcher",
    "Matched",
    "Matcher",
    "NoAlignmentError",
    "RowsMatcher",
    "TrainedMatcher",
    "UnpairedMatcher",
    "match_each",
]
