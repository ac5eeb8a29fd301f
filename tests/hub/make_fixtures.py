"""Write what this version writes, for later versions to read: ``python tests/hub/make_fixtures.py VERSION``.

The networks have random weights and take a few kB. Each artefact is written together with an input and its output. What
is there already stays as it is.
"""

from __future__ import annotations

import sys

from fixture_files import FILES
from fixture_models import MODELS
from fixture_networks import FIXTURES
from fixture_results import results

MAKERS = {**MODELS, **FILES, "results": results}
"""Name of a file or folder -> function that writes it."""


def main(version: str) -> None:
    """Write all artefacts that are missing."""
    folder = FIXTURES / version
    folder.mkdir(exist_ok=True)
    for name, make in MAKERS.items():
        if not (folder / name).exists():
            make(folder / name)


if __name__ == "__main__":
    main(sys.argv[1])
