"""Pages of the documentation about errors that people meet: the messages of these errors end with their address."""

from __future__ import annotations

from typing import Literal

Page = Literal[
    "damaged-file",
    "heads",
    "missing-weights",
    "no-example",
    "no-name",
    "not-a-cut",
    "not-saved",
    "other-labels",
    "other-order",
    "other-tokens",
    "other-weights",
    "too-few-samples",
    "too-large",
]
"""All pages, each the name of a file in ``docs/errors``."""

ADDRESS = "https://github.com/hf-stitch/hf-stitch/blob/main/docs/errors/{}.md"


def see(page: Page) -> str:
    """Return the last line of a message: the address of the page about the error."""
    return f"\nSee {ADDRESS.format(page)}"
