"""What all tests and doctests share, those of plugins too."""

from __future__ import annotations

import atexit
import gc
import logging
import random
import sys

import pytest

pytest_plugins = ["tests.tiers"]
gc.disable()  # until all libraries and tests are imported, which stay


def pytest_collection_finish() -> None:
    """Look for garbage from here on, but not among what is there already, which would take a second."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # so that what is left ends as in any program


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test begins with the same random numbers, whichever ran before it."""
    import numpy as np  # not by the process that only hands tests to others, which reads this file too
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


class NothingDeprecated(logging.Handler):
    """Raises an error where our code calls what transformers logs as deprecated: no filter of warnings sees a log."""

    LIBRARIES = ("contextlib", "functools", "logging", "torch", "transformers")

    def emit(self, record: logging.LogRecord) -> None:
        """Look for the caller outside of the libraries."""
        frame = sys._getframe(1) if "deprecated" in record.getMessage() else None
        while frame is not None and (
            frame.f_globals.get("__name__", "").split(".")[0] in self.LIBRARIES
            or frame.f_code.co_name == "generate"  # it passes on what its caller gives
        ):
            if frame.f_globals.get("__name__", "").endswith(".generation_whisper"):
                return  # which calls generate of its base class in a deprecated way itself
            frame = frame.f_back
        if frame is not None and frame.f_globals.get("__name__", "").startswith("hf_stitch"):
            raise AssertionError(f"{frame.f_code.co_filename}:{frame.f_lineno}: {record.getMessage()}")


logging.getLogger("transformers").addHandler(NothingDeprecated(logging.WARNING))
