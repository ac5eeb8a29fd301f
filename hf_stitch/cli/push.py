"""``hf-stitch push``: upload a saved artefact to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_stitch.cli.options import AsJson
from hf_stitch.cli.output import Output


def push(
    folder: Annotated[Path, typer.Argument(help="A saved stitcher or stitched model.", exists=True, file_okay=False)],
    repo_id: Annotated[
        str, typer.Argument(metavar="ID", help="Repository, as owner/name. Created if it does not exist.")
    ],
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public",
            help="Visibility of a new repository.",
            show_default="the setting of the owner",
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch. Created if it does not exist.", show_default="main")
    ] = None,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request instead of a commit to the branch.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Upload a saved stitcher or stitched model with its card in one commit. Log in first: hf auth login."""
    from hf_stitch.cli.artefacts import read

    output = Output(json)
    card = folder / "README.md"
    options: dict[str, Any] = {"commit_message": message} if message else {}
    commit = read(folder).push_to_hub(
        repo_id,
        private=private,
        revision=revision,
        create_pr=create_pr,
        present=card.read_text(encoding="utf-8") if card.is_file() else None,
        **options,
    )
    output.show(f"pushed {commit.pr_url or commit.commit_url}")
    output.record({"commit": commit.oid, "url": commit.commit_url, "pull_request": commit.pr_url})
