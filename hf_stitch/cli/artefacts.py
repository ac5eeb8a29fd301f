"""``hf-stitch push`` and ``hf-stitch pull``, and loading of stitchers and stitched models."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_stitch.cli.functions import check_artefact, is_function
from hf_stitch.cli.options import AsJson, Shared, check_place
from hf_stitch.cli.output import Output

if TYPE_CHECKING:
    from hf_stitch.artefacts import StitchedModel, Stitcher


def push(
    folder: Annotated[Path, typer.Argument(help="A saved stitcher or stitched model.", exists=True, file_okay=False)],
    repo_id: Annotated[
        str, typer.Argument(metavar="ID", help="Repository, as owner/name. Created if it does not exist.")
    ],
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Visibility if new.", show_default="the setting of the owner"),
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
    card_path = folder / "README.md"
    options: dict[str, Any] = {"commit_message": message} if message else {}
    card_text = card_path.read_text(encoding="utf-8") if card_path.is_file() else None
    commit = read(folder).push_to_hub(
        repo_id, private=private, revision=revision, create_pr=create_pr, present=card_text, **options
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
    read(folder)  # raises an error for damaged files
    files = sorted(path for path in folder.iterdir() if path.is_file())
    with replacing(out, lambda out: stale(out, STITCHER) | stale(out, CONFIG)) as fresh:
        for path in files:
            shutil.copyfile(path, fresh / path.name)
    read(out)  # checks the copy
    output.show(f"pulled {repo_id} at commit {folder.name} into {out}")
    output.record({"commit": folder.name, "files": [path.name for path in files], "folder": str(out)})


def read(folder: Path) -> Stitcher | StitchedModel:
    """Load and check the artefact in a folder."""
    from hf_stitch.artefacts import StitchedModel, Stitcher
    from hf_stitch.artefacts.description import is_stitcher

    return Stitcher.from_pretrained(folder) if is_stitcher(folder) else StitchedModel.from_pretrained(folder)


def attach(name: str, shared: Shared, argument: str, parents: Mapping[str, Any]) -> StitchedModel:
    """Load a stitched model, or attach a stitcher to the passed networks or the networks that it names.

    Missing networks are usage errors.
    """
    from hf_stitch.artefacts import StitchedModel, Stitcher

    check_artefact(name, argument)
    torch_device, options = check_place(shared.device, shared.dtype)
    if (Path(name) / "stitcher.json").is_file():
        stitcher = Stitcher.from_pretrained(name)
        for side, network in parents.items():
            _require(f"--{side}", network or getattr(stitcher, side).id)
        stitched = stitcher.attach(**parents, **options)
    else:
        stitched = StitchedModel.from_pretrained(name, **options)
        if "target" in parents:
            _require("--target", parents["target"] or (stitched.config.target or {})["reference"]["id"])
    return stitched if torch_device is None else stitched.to(torch_device)  # type: ignore[arg-type]


def _require(option: str, network: Any) -> None:
    if network is None or (isinstance(network, str) and is_function(network)):
        raise typer.BadParameter(
            "is required, because artefacts neither record local folders nor run files of code; pass the network again",
            param_hint=option,
        )
