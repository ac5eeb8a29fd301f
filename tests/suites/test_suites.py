"""The common tests of transformers pass on stitched models, or do not for a reason that the documentation gives."""

from __future__ import annotations

import pytest
import transformers

pytest.importorskip("parameterized", reason="the tests of transformers need it")

import suites


def test_stitched_models_pass_the_tests_of_transformers() -> None:
    try:
        found = suites.reports()
    except OSError as error:
        pytest.skip(f"no source distribution of transformers: {error}")
    assert not [f"{each.title}: {wrong}" for each in found for wrong in each.wrong]
    assert all(len(each.failed) <= 0.05 * len(each.applied) for each in found)
    written = suites.WRITTEN.read_text("utf-8")
    if transformers.__version__ in written:
        assert written == suites.page(found), "renew the page: make suites"
