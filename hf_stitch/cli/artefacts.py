"""Load the artefact in a folder, whichever of the two kinds it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hf_stitch.cli.functions import check_artefact, is_function
from hf_stitch.cli.options import Shared, check_place

if TYPE_CHECKING:
    from hf_stitch.artefacts import StitchedModel, Stitcher


def read(folder: Path) -> Stitcher | StitchedModel:
    """Load and check the artefact in a folder."""
    from hf_stitch.artefacts import StitchedModel, Stitcher
    from hf_stitch.artefacts.description import is_stitcher

    return Stitcher.from_pretrained(folder) if is_stitcher(folder) else StitchedModel.from_pretrained(folder)


def attach(name: str, shared: Shared, argument: str, parents: Mapping[str, Any]) -> StitchedModel:
    """Load a stitched model, or attach a stitcher to the networks that are given or that it names.

    Those of ``parents`` that are neither given nor named are wrong usage.
    """
    from hf_stitch.artefacts import StitchedModel, Stitcher

    check_artefact(name, argument)
    place, options = check_place(shared.device, shared.dtype)
    if (Path(name) / "stitcher.json").is_file():
        stitcher = Stitcher.from_pretrained(name)
        for side, network in parents.items():
            _require(f"--{side}", network or getattr(stitcher, side).id)
        found = stitcher.attach(**parents, **options)
    else:
        found = StitchedModel.from_pretrained(name, **options)
        if "target" in parents:
            _require("--target", parents["target"] or (found.config.target or {})["reference"]["id"])
    return found if place is None else found.to(place)  # type: ignore[arg-type]


def _require(option: str, network: Any) -> None:
    if network is None or (isinstance(network, str) and is_function(network)):
        raise typer.BadParameter(
            "is required: this network came from a local folder or a file of code, which artefacts neither record nor "
            "run; name it again",
            param_hint=option,
        )
