"""Resolves model names, which are local folders or repositories on the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

from worker.protocol.retry import Unavailable, may_heal

_COMMIT = re.compile(r"[0-9a-f]{40}")


def at_revision(model: str, revision: str) -> str:
    """Model name with a revision: ORGANIZATION/NAME@REVISION.

    This is one string, so that the revision is always passed along with the name.
    """
    return f"{model}@{revision}" if revision else model


def local_folder(model: str) -> Path | None:
    """Local folder that `model` names; None if it is a repository name.

    Raises:
        Unavailable: the name can only be a folder's, and the folder does not exist.
        ValueError: a revision was given for a folder.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    model, _, revision = model.partition("@")
    if revision and Path(model).expanduser().is_dir():
        raise ValueError(
            f"{model} is a local folder, which has no revision {revision}: remove the revision"
        )
    if _can_only_be_folder(model):
        raise Unavailable(
            f"model folder {model} does not exist: use a checkpoint folder or a Hub repository"
        )
    return None


def download(repository: str, files: Sequence[str], ignored: Sequence[str] = ()) -> Path:
    """Snapshot of a repository's files in the local Hub cache, downloaded if necessary.

    Respects HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and HF_TOKEN.

    Args:
        repository: ORGANIZATION/NAME, or ORGANIZATION/NAME@REVISION.
        files: glob patterns of files to download.
        ignored: glob patterns of files to exclude.

    Raises:
        Unavailable: the Hub is unreachable or busy, and the cache has no complete snapshot.
        ValueError: the Hub denies access to the repository or does not have it.
    """
    from huggingface_hub import snapshot_download  # slow to import, only needed for Hub names
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
        # The library fell back to the cache because of another error, which is more informative.
        kind = Unavailable if hub_may_heal(error.__cause__ or error) else ValueError
        raise kind(
            f"{repository} is neither a local folder nor in the Hub cache, and the Hub cannot be "
            f"reached ({_in_one_line(error.__cause__ or error)}): unset HF_HUB_OFFLINE if it is "
            "set, download the model first, or use a local folder"
        ) from error
    except Exception as error:
        kind = Unavailable if hub_may_heal(error) else ValueError
        raise kind(
            f"{repository} is not a local folder and cannot be downloaded from the Hub: "
            f"{_in_one_line(error)}"
        ) from error


def commit_of(model: str) -> str:
    """Commit hash of a model on the Hub, or in its local cache; empty for a folder.

    Raises:
        Unavailable: the commit cannot be determined now.
        ValueError: the Hub denies access to the repository, or a revision is given for a folder.
    """
    name, _, revision = model.partition("@")
    if not revision and _can_only_be_folder(name):
        return ""  # it may be created later
    if local_folder(model) is not None:
        return ""
    # In the cache, a snapshot's folder is named after its commit.
    return revision if _COMMIT.fullmatch(revision) else download(model, ["config.json"]).name


def _can_only_be_folder(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def hub_may_heal(error: BaseException) -> bool:
    """Whether retrying a failed download later may succeed.

    Client errors (4xx) are permanent (no such repository, gated, invalid token), except for 408,
    425 and 429.
    """
    import httpx2  # the HTTP client of huggingface_hub
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
