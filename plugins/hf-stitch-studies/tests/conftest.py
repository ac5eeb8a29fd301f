"""Fixtures of the tests of studies."""

import study_scripts  # noqa: F401  # the scripts import each other from their folder

from tests.stitched_classifiers import place  # noqa: F401
