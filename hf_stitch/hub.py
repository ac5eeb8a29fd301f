"""Folders of the Hub: downloaded and uploaded whole, with errors that say what happened and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi

CARD = "README.md"


class DownloadOptions(TypedDict, total=False):
    """How the Hub is reached to read from it.

    Attributes:
        revision: Branch, tag or commit; default: the default branch.
        token: Hub token; default: the one that this machine is logged in with.
        cache_dir: Where downloads are kept.
        local_files_only: Use what is cached only.
        force_download: Download again.
    """

    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    force_download: bool


class UploadOptions(TypedDict, total=False):
    """How something is uploaded.

    Attributes:
        private: Whether a model that is created is private; default: the namespace's own rule.
        token: Hub token; default: the one that this machine is logged in with.
        revision: Branch; created if it does not exist.
        commit_message: Its message.
        create_pr: Open a pull request instead of committing.
    """

    private: bool | None
    token: str | bool | None
    revision: str | None
    commit_message: str
    create_pr: bool


def download(repo_id: str, *, files: list[str], **options: Unpack[DownloadOptions]) -> Path:
    """Some files of a model on the Hub, from the cache where it has them.

    Args:
        repo_id: The model.
        files: Patterns of the names of the files wanted; none in subfolders.
        **options: As in :class:`DownloadOptions`.

    Returns:
        The folder that holds them; its name is the commit.

    Raises:
        FileNotFoundError: If there is no such model or revision that the token may see, or nothing cached offline.
        PermissionError: If the model is gated, or the token may not read it.
        ConnectionError: If the Hub cannot be reached, or the connection broke.
        OSError: If the Hub answers with another error.
    """
    from huggingface_hub import snapshot_download

    revision = options.get("revision")
    place = f"{repo_id}@{revision}" if revision else repo_id
    with _telling(f"{place} could not be downloaded"):
        folder = snapshot_download(repo_id, allow_patterns=files, ignore_patterns=["*/*"], **options)
    return Path(folder)


def commit_of(repo_id: str, **options: Unpack[DownloadOptions]) -> str | None:
    """The commit that a revision of a model is at now, so that all files of one load are of one commit.

    Args:
        repo_id: The model.
        **options: As in :class:`DownloadOptions`.

    Returns:
        ``None`` where there is no such model, or it cannot be reached: what loads it then gives the better error.
    """
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo_id, "config.json", **options)).parent.name
    except Exception:  # whatever it is, what loads the model meets it too
        return None


def upload(
    folder: Path,
    repo_id: str,
    *,
    replaces: list[str],
    card: Callable[[str, str | None], str],
    **options: Unpack[UploadOptions],
) -> CommitInfo:
    """A folder to the Hub in one commit: all of it arrives, or nothing changes.

    Args:
        folder: What to upload; files in subfolders are left out.
        repo_id: The model; created if it does not exist. Without a namespace: the user's own.
        replaces: Patterns of names: such files of the model that the folder does not have are deleted with the commit
            (shards of an earlier upload).
        card: From the model's full id and its present card to the new one.
        **options: As in :class:`UploadOptions`.

    Returns:
        The commit: ``oid``, ``commit_url``, ``pr_url``.

    Raises:
        FileNotFoundError: If there is no such revision.
        PermissionError: If the token is missing or may not write there.
        ConnectionError: If the Hub cannot be reached, or the connection broke.
        OSError: If the Hub answers with another error, as when someone else pushed in between.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(token=options.get("token"))
    revision, create_pr = options.get("revision"), options.get("create_pr", False)
    with _telling(f"{repo_id} could not be uploaded"):
        repo_id = api.create_repo(repo_id, private=options.get("private"), exist_ok=True).repo_id
        if revision is not None and not create_pr and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        info = api.model_info(repo_id, revision=revision)
        assert info.sha is not None
        there = {sibling.rfilename for sibling in info.siblings or ()}
        present = _read(api, repo_id, CARD, info.sha) if CARD in there else None
        adds: dict[str, Any] = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
        adds[CARD] = card(repo_id, present).encode()
        stale = sorted(
            name for name in there - adds.keys() if "/" not in name and any(fnmatch(name, p) for p in replaces)
        )
        return api.create_commit(
            repo_id,
            [
                *(CommitOperationAdd(name, content) for name, content in adds.items()),
                *(CommitOperationDelete(name) for name in stale),
            ],
            commit_message=options.get("commit_message", "Upload"),
            revision=revision,
            create_pr=create_pr,
            parent_commit=info.sha,
        )


def _read(api: HfApi, repo_id: str, name: str, commit: str) -> str:
    # Not by the cache's way of names: line ends stay as they are.
    return Path(api.hf_hub_download(repo_id, name, revision=commit)).read_bytes().decode("utf-8-sig")


@contextmanager
def _telling(failure: str) -> Iterator[None]:
    """Errors of the Hub's client as Python's own, each with what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:
        raise FileNotFoundError(
            f"{failure}: there is no such folder here, and a model on the Hub is called 'owner/name'"
        ) from error
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{failure}: it is gated; ask for access on its page, then log in (hf auth login) or pass token="
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(
            f"{failure}: it has no such revision; look at its branches and commits on the Hub"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{failure}: the Hub has no such model, or it is private and the token may not see it; check the id, log "
            "in (hf auth login) or pass token="
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{failure}: it is not in the cache (or not whole), and the Hub was not asked or did not answer"
            f"{_reason(error)}; connect, and let it be downloaded once (local_files_only=False)"
        ) from error
    except errors.HfHubHTTPError as error:
        raise _answer(failure, error.response.status_code, error.server_message) from error
    except errors.LocalTokenNotFoundError as error:
        raise PermissionError(f"{failure}: this machine is not logged in; hf auth login, or pass token=") from error
    except (errors.HTTPError, RuntimeError) as error:  # the latter for large files
        raise ConnectionError(
            f"{failure}: the connection broke, or the upload was refused{_reason(error)}; try again: nothing was left "
            "half done"
        ) from error
    except OSError as error:
        raise OSError(f"{failure}: {error}") from error


def _answer(failure: str, status: int, said: str | None) -> OSError:
    """What an HTTP status of the Hub means."""
    words = f" ({said})" if said else ""
    kind: type[OSError]
    if status in (401, 403):
        kind, advice = PermissionError, f"the token may not do this{words}; log in (hf auth login) or pass token="
    elif status in (409, 412):
        kind, advice = OSError, f"it changed while it was written{words}; look at what changed and push again"
    elif status >= 500 or status == 429:
        kind, advice = ConnectionError, f"the Hub answers {status}{words}; try again later"
    else:
        kind, advice = OSError, f"the Hub answers {status}{words}"
    return kind(f"{failure}: {advice}")


def _reason(error: BaseException) -> str:
    """The first line of what lies at the bottom of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f" ({type(error).__name__}: {lines[0]})" if lines else f" ({type(error).__name__})"
