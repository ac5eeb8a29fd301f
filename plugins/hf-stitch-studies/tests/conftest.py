"""Fixtures of the tests of studies."""

from tests.stitched_classifiers import place  # noqa: F401
