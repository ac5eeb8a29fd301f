"""``hf-stitch push`` and ``hf-stitch pull``: upload a saved artefact to the Hub, and download one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_stitch.cli.artefacts import read
from hf_stitch.cli.options import AsJson
from hf_stitch.cli.output import Output


def push(
    folder: Annotated[Path, typer.Argument(help="A saved stitcher or stitched model.", exists=True, file_okay=False)],
    repo_id: Annotated[
        str, typer.Argument(metavar="ID", help="Repository, as owner/name. Created if it does not exist.")
    ],
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Visibility of a new one.", show_default="the setting of the owner"),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, created if absent.", show_default="main")] = None,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request instead of a commit to the branch.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Upload a saved stitcher or stitched model with its card in one commit. Log in first: hf auth login."""
    output = Output(json)
    card = folder / "README.md"
    options: dict[str, Any] = {"commit_message": message} if message else {}
    present = card.read_text(encoding="utf-8") if card.is_file() else None
    commit = read(folder).push_to_hub(
        repo_id, private=private, revision=revision, create_pr=create_pr, present=present, **options
    )
    output.show(f"pushed {commit.pr_url or commit.commit_url}")
    output.record({"commit": commit.oid, "url": commit.commit_url, "pull_request": commit.pr_url})


def pull(
    repo_id: Annotated[str, typer.Argument(metavar="ID", help="A stitcher or stitched model on the Hub.")],
    out: Annotated[Path, typer.Option(help="Output folder. An artefact in it is replaced.", file_okay=False)],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.", show_default="main")] = None,
    json: AsJson = False,
) -> None:
    """Download a stitcher or stitched model from the Hub into a folder, and verify its files."""
    from hf_stitch import hub
    from hf_stitch.artefacts.files import CONFIG, MODEL_FILES, STITCH, STITCHER, stale
    from hf_stitch.storage.files import replacing

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
