"""``hf-stitch pull``: download an artefact from the Hub."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from hf_stitch.cli.options import AsJson
from hf_stitch.cli.output import Output


def pull(
    repo_id: Annotated[str, typer.Argument(metavar="ID", help="A stitcher or stitched model on the Hub.")],
    out: Annotated[Path, typer.Option(help="Output folder. An artefact in it is replaced.", file_okay=False)],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.", show_default="main")] = None,
    json: AsJson = False,
) -> None:
    """Download a stitcher or stitched model from the Hub into a folder, and verify its files."""
    from hf_stitch import hub
    from hf_stitch.artefacts.files import CONFIG, MODEL_FILES, STITCH, STITCHER
    from hf_stitch.artefacts.manifest import stale
    from hf_stitch.cli.artefacts import read
    from hf_stitch.storage.folders import replacing

    output = Output(json)
    folder = hub.download(repo_id, files=[hub.CARD, STITCHER, STITCH, *MODEL_FILES], revision=revision)
    read(folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    with replacing(out, lambda out: stale(out, STITCHER) | stale(out, CONFIG)) as fresh:
        for path in files:
            shutil.copyfile(path, fresh / path.name)
    read(out)
    output.show(f"pulled {repo_id} at commit {folder.name} into {out}")
    output.record({"commit": folder.name, "files": [path.name for path in files], "folder": str(out)})
