"""Load the artefact in a folder, whichever of the two kinds it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_stitch.artefacts import StitchedModel, Stitcher


def read(folder: Path) -> Stitcher | StitchedModel:
    """Load and check the artefact in a folder."""
    from hf_stitch.artefacts import StitchedModel, Stitcher
    from hf_stitch.artefacts.description import is_stitcher

    return Stitcher.from_pretrained(folder) if is_stitcher(folder) else StitchedModel.from_pretrained(folder)
