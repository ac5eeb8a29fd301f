"""A Hub of one's own, and this process turned to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server import Hub  # isort: skip


@contextmanager
def turned_to_a_hub(cache: Path) -> Iterator[Hub]:
    """A running Hub; the real client of this process talks to it as ``alice``, with a cache of its own."""
    import huggingface_hub
    import transformers.utils.hub
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    with Hub() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(cache),
            "HF_TOKEN_PATH": str(cache / "no-token"),
        }.items():
            patch.setattr(constants, name, value)
        patch.setattr(huggingface_hub.hf_api.api, "endpoint", server.url)
        patch.setattr(transformers.utils.hub, "_hf_api", None)  # made anew, for this Hub
        patch.setattr(_http.time, "sleep", lambda _: None)  # between attempts
        patch.setenv("HF_TOKEN", "alice-token")
        yield server


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A Hub for one test."""
    with turned_to_a_hub(tmp_path / "cache") as server:
        yield server


@pytest.fixture(scope="module")
def shared_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A Hub for the tests of a module."""
    with turned_to_a_hub(tmp_path_factory.mktemp("hub") / "cache") as server:
        yield server
