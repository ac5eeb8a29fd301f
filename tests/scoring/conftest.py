"""Fixtures of the tests of scoring."""

from stitched_classifiers import place  # noqa: F401
