"""Fixtures of the tests of analyses."""

from stitched_classifiers import place  # noqa: F401
