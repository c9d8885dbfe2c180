"""Models by name: a folder of this machine, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

from worker.protocol.retry import Unavailable, may_heal

_COMMIT = re.compile(r"[0-9a-f]{40}")


def at_revision(model: str, revision: str) -> str:
    """Name with revision by which a model's files are loaded: ORGANIZATION/NAME@REVISION.

    It is one string, so that the revision is not lost where the name is handed on.
    """
    return f"{model}@{revision}" if revision else model


def local_folder(model: str) -> Path | None:
    """The folder that `model` names; None where it is a repository's name.

    Raises:
        Unavailable: the name can only be that of a folder, and there is none.
        ValueError: a revision of a folder is asked for.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    model, _, revision = model.partition("@")
    if revision and Path(model).expanduser().is_dir():
        raise ValueError(
            f"{model} is a folder here, which has no revision {revision}: leave --revision out"
        )
    if _can_only_be_folder(model):
        raise Unavailable(
            f"the model folder {model} does not exist: give a checkpoint folder or a Hub repository"
        )
    return None


def download(repository: str, files: Sequence[str], ignored: Sequence[str] = ()) -> Path:
    """Folder with a snapshot of a repository's files in the Hub's cache, downloaded if need be.

    The environment's HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and HF_TOKEN apply.

    Args:
        repository: ORGANIZATION/NAME, or ORGANIZATION/NAME@REVISION.
        files: patterns of the names of files to download.
        ignored: patterns of files that are left out nevertheless.

    Raises:
        Unavailable: the Hub cannot be reached or is busy, and the cache has no whole snapshot.
        ValueError: the Hub refuses the repository, or has none of that name.
    """
    from huggingface_hub import snapshot_download  # slow to import, needed for Hub names only
    from huggingface_hub.errors import LocalEntryNotFoundError

    name, _, revision = repository.partition("@")
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=list(files),
                ignore_patterns=list(ignored) or None,
            )
        )
    except LocalEntryNotFoundError as error:
        # The library has read the cache because of another error, which says more.
        kind = Unavailable if hub_may_heal(error.__cause__ or error) else ValueError
        raise kind(
            f"{repository} is neither a folder here nor in the Hub's cache, and the Hub cannot be "
            f"reached (is HF_HUB_OFFLINE set?): download it first or give a folder: "
            f"{_in_one_line(error.__cause__ or error)}"
        ) from error
    except Exception as error:
        kind = Unavailable if hub_may_heal(error) else ValueError
        raise kind(
            f"{repository} is no folder here and the Hub does not give it: {_in_one_line(error)}"
        ) from error


def commit_of(model: str) -> str:
    """Commit that the Hub, or else its local cache, has for a name; empty for a folder.

    Raises:
        Unavailable: the commit cannot be known now.
        ValueError: the Hub refuses the repository, or a revision of a folder is asked for.
    """
    name, _, revision = model.partition("@")
    if not revision and _can_only_be_folder(name):
        return ""  # which may come later
    if local_folder(model) is not None:
        return ""
    # A snapshot's folder in the cache has its commit's name.
    return revision if _COMMIT.fullmatch(revision) else download(model, ["config.json"]).name


def _can_only_be_folder(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def hub_may_heal(error: BaseException) -> bool:
    """Whether a download that failed may succeed later.

    Statuses from 400 on are about the request (no such repository, gated, no valid token), but for
    three that ask to try again.
    """
    import httpx2  # what huggingface_hub speaks HTTP with
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in (
            HTTPStatus.REQUEST_TIMEOUT,
            HTTPStatus.TOO_EARLY,
            HTTPStatus.TOO_MANY_REQUESTS,
        )
    return may_heal(error) and not isinstance(error, httpx2.UnsupportedProtocol | httpx2.InvalidURL)


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
