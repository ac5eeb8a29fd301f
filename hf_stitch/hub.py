"""Download and upload of folders on the Hub, with errors that state cause and remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi

CARD = "README.md"


class DownloadOptions(TypedDict, total=False):
    """Options of downloads from the Hub.

    Attributes:
        revision: Branch, tag or commit; default: the default branch.
        token: Hub token; default: the saved login token.
        cache_dir: Folder for downloaded files; default: the cache of ``huggingface_hub``.
        local_files_only: Use cached files only (default: ``False``).
        force_download: Download files even if they are cached (default: ``False``).

    Example:
        >>> DownloadOptions(revision="main", local_files_only=True)
        {'revision': 'main', 'local_files_only': True}
    """

    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    force_download: bool


class UploadOptions(TypedDict, total=False):
    """Options of uploads to the Hub.

    Attributes:
        private: Whether a newly created model is private; default: the setting of the namespace.
        token: Hub token; default: the saved login token.
        revision: Branch; created if missing. Default: the default branch.
        commit_message: Message of the commit (default: ``"Upload"``).
        create_pr: Open a pull request instead of committing (default: ``False``).

    Example:
        >>> UploadOptions(private=True, commit_message="Ridge stitch")
        {'private': True, 'commit_message': 'Ridge stitch'}
    """

    private: bool | None
    token: str | bool | None
    revision: str | None
    commit_message: str
    create_pr: bool


def download(repo_id: str, *, files: list[str], subfolder: str = "", **options: Unpack[DownloadOptions]) -> Path:
    """Download files of a Hub model that are not in the cache."""
    from huggingface_hub import snapshot_download

    revision = options.get("revision")
    repo_at_revision = f"{repo_id}@{revision}" if revision else repo_id
    with _readable_errors(f"{repo_at_revision} could not be downloaded"):
        prefix = f"{subfolder}/" if subfolder else ""
        patterns, subfolders = [f"{prefix}{pattern}" for pattern in files], [f"{prefix}*/*"]
        folder = snapshot_download(repo_id, allow_patterns=patterns, ignore_patterns=subfolders, **options)
    return Path(folder, subfolder)


def file_of(repo_id: str, name: str, *, subfolder: str = "", **options: Unpack[DownloadOptions]) -> Path | None:
    """Return a file of a model from a folder, the cache or the Hub; ``None`` if it is not available."""
    from huggingface_hub import errors, hf_hub_download

    if (folder := Path(repo_id, subfolder)).is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        return Path(hf_hub_download(repo_id, name, subfolder=subfolder or None, **options))
    except (OSError, ValueError, errors.HTTPError):  # loading the model raises the same error
        return None


def commit_of(
    repo_id: str, name: str = "config.json", *, subfolder: str = "", **options: Unpack[DownloadOptions]
) -> str | None:
    """Resolve a revision of a model to a commit by one of its files, so that all loaded files are of one commit."""
    file = file_of(repo_id, name, subfolder=subfolder, **options)
    return file.parents[len(Path(subfolder or "").parts)].name if file else None


def license_of(repo_or_folder: str, revision: str | None = None, *, ask: bool = False) -> str | None:
    """Return the licence in the card of a model in a folder or the cache, or, with ``ask``, on the Hub.

    Returns ``None`` without a licence, also after errors.
    """
    from huggingface_hub import ModelCard

    if (file := file_of(repo_or_folder, CARD, revision=revision, local_files_only=not ask)) is None:
        return None
    try:
        licence = ModelCard(file.read_text(encoding="utf-8"), ignore_metadata_errors=True).data.get("license")
    except Exception:  # from the Hub, the file, or its metadata
        return None
    return ", ".join(map(str, licence)) if isinstance(licence, list) else licence


def is_out_of_reach(repo_id: str, *, revision: str | None = None, token: str | bool | None = None) -> bool:
    """Return whether the Hub cannot be reached, after a single request.

    The Hub client would retry each request for an uncached file for 23 seconds, and libraries look for several files
    that most models do not have.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(repo_id, "config.json", revision=revision), token=token)
    except errors.HfHubHTTPError:  # the Hub answered
        return False
    except (OSError, errors.HTTPError):
        return True
    return False


def upload(
    folder: Path,
    repo_id: str,
    *,
    replaces: list[str],
    card: Callable[[str, str | None], str],
    **options: Unpack[UploadOptions],
) -> CommitInfo:
    """Upload a folder to the Hub in one commit: either all files change, or none."""
    from huggingface_hub import HfApi

    api = HfApi(token=options.get("token"))
    revision, create_pr = options.get("revision"), options.get("create_pr", False)
    with _readable_errors(f"{repo_id} could not be uploaded"):
        repo_id = api.create_repo(repo_id, private=options.get("private"), exist_ok=True).repo_id
        if revision is not None and not create_pr and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        info = api.model_info(repo_id, revision=revision)
        assert info.sha is not None
        remote_files = {sibling.rfilename for sibling in info.siblings or ()}
        card_text = _read(api, repo_id, CARD, info.sha) if CARD in remote_files else None
        # Patterns would also match files in subfolders, which belong to other artefacts.
        stale = [name for name in remote_files if "/" not in name and any(fnmatch(name, p) for p in replaces)]
        (folder / CARD).write_bytes(card(repo_id, card_text).encode())
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            delete_patterns=stale,
            commit_message=options.get("commit_message", "Upload"),
            revision=revision,
            create_pr=create_pr,
            parent_commit=info.sha,
        )


def _read(api: HfApi, repo_id: str, name: str, commit: str) -> str:
    # Bytes, because reading as text would change line ends.
    return Path(api.hf_hub_download(repo_id, name, revision=commit)).read_bytes().decode("utf-8-sig")


def explained(failure: str, error: BaseException) -> OSError | None:
    """Find the error of the Hub client behind an error, and turn it into a built-in exception with advice.

    Libraries wrap errors of the client, so the causes and contexts of the error are searched, too.

    Returns a ``PermissionError`` for refused access (401, 403, gated models), a ``FileNotFoundError`` for a missing
    model, revision or file (404, or not cached and offline), a ``ConnectionError`` for a missing response (429, 5xx),
    an ``OSError`` for other statuses, and ``None`` if the client did not raise an error.
    """
    from huggingface_hub import errors

    types = (errors.HTTPError, errors.EntryNotFoundError, errors.HFValidationError, errors.LocalTokenNotFoundError)
    client_errors = [link for link in _chain(error) if isinstance(link, types)]
    if not client_errors or not isinstance(error, (OSError, RuntimeError, *types)):
        return None
    # The error for an uncached file hides the reason why the Hub did not send it.
    cause = next(
        (link for link in client_errors if not isinstance(link, errors.LocalEntryNotFoundError)), client_errors[0]
    )
    status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else 0
    server_text = f" ({message})" if status and (message := getattr(cause, "server_message", None)) else ""
    table: tuple[tuple[bool, type[OSError], str], ...] = (
        (
            isinstance(cause, errors.HFValidationError), FileNotFoundError,
            "it is neither a local folder nor a Hub id, 'owner/name'",
        ),
        (
            isinstance(cause, errors.GatedRepoError), PermissionError,
            "it is gated; request access on its page, then log in (hf auth login) or pass token=",
        ),
        (
            isinstance(cause, errors.RevisionNotFoundError), FileNotFoundError,
            "the revision does not exist; check the branches and commits on the Hub",
        ),
        (
            isinstance(cause, errors.RepositoryNotFoundError), FileNotFoundError,
            "the model does not exist on the Hub, or it is private and the token does not give access; check the id, "
            "log in (hf auth login) or pass token=",
        ),
        (
            isinstance(cause, errors.LocalEntryNotFoundError), FileNotFoundError,
            f"it is not in the cache (or incomplete), and the Hub was not contacted{_reason(cause)}; connect to the "
            "network and download it once (local_files_only=False)",
        ),
        (isinstance(cause, errors.EntryNotFoundError), FileNotFoundError, str(error)),
        (
            isinstance(cause, errors.LocalTokenNotFoundError), PermissionError,
            "this machine is not logged in; log in (hf auth login) or pass token=",
        ),
        (
            status in (401, 403), PermissionError,
            f"the token does not permit this{server_text}; log in (hf auth login) or pass token=",
        ),
        (
            status == 404, FileNotFoundError,
            f"the model or file does not exist on the Hub{server_text}; check the id and the revision",
        ),
        (
            status in (409, 412), OSError,
            f"it changed during the upload{server_text}; check the changes and push again",
        ),
        (
            status == 429, ConnectionError,
            f"too many requests, status 429{server_text}; log in (hf auth login), or wait",
        ),
        (status >= 500, ConnectionError, f"the Hub returned status {status}{server_text}; try again later"),
        (status > 0, OSError, f"the Hub returned status {status}{server_text}"),
        (
            True, ConnectionError,
            f"the Hub did not respond, or the connection broke{_reason(cause)}; try again, nothing was changed",
        ),
    )  # fmt: skip
    kind, advice = next((kind, advice) for applies, kind, advice in table if applies)
    return kind(f"{failure}: {advice}")


def refused(failure: str, repo_id: str, files: Sequence[str], **options: Unpack[DownloadOptions]) -> OSError | None:
    """Return the error with which the Hub refuses files; libraries report any such error as a missing file."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    if options.get("local_files_only"):
        return None
    for name in files:
        try:
            get_hf_file_metadata(
                hf_hub_url(repo_id, name, revision=options.get("revision")), token=options.get("token")
            )
        except errors.EntryNotFoundError:
            continue
        except errors.HFValidationError:  # not a model of the Hub
            return None
        except Exception as error:
            return explained(failure, error)
        return None
    return FileNotFoundError(
        f"{failure}: it contains neither {' nor '.join(files)}, and other formats are not supported"
    )


@contextmanager
def _readable_errors(failure: str) -> Iterator[None]:
    """Translate errors of the Hub client into built-in exceptions with advice."""
    try:
        yield
    except RuntimeError as error:  # raised for large files
        raise ConnectionError(
            f"{failure}: the connection broke, or the upload was refused{_reason(error)}; try again, nothing was "
            "changed"
        ) from error
    except Exception as error:
        if (explanation := explained(failure, error)) is not None:
            raise explanation from error
        if isinstance(error, OSError):
            raise OSError(f"{failure}: {error}") from error
        raise


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an error and its causes and contexts."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _reason(error: BaseException) -> str:
    """Return the class and first line of the root cause of an error."""
    *_, error = _chain(error)
    lines = str(error).strip().splitlines()
    return f" ({type(error).__name__}: {lines[0]})" if lines else f" ({type(error).__name__})"
