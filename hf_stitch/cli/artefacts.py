"""Which of the two artefacts a folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_stitch.artefacts import StitchedModel, Stitcher


def is_stitcher(folder: Path) -> bool:
    """Whether a folder holds a stitcher; a stitched model otherwise.

    Raises:
        FileNotFoundError: If it holds neither.
    """
    if (folder / "stitcher.json").is_file():
        return True
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} has neither stitcher.json nor config.json: it holds no stitcher and no stitched model"
        )
    return False


def read(folder: Path) -> Stitcher | StitchedModel:
    """The artefact in a folder, checked.

    Raises:
        ValueError: If it is damaged.
    """
    from hf_stitch.artefacts import StitchedModel, Stitcher

    return Stitcher.from_pretrained(folder) if is_stitcher(folder) else StitchedModel.from_pretrained(folder)
