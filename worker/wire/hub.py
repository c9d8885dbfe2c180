"""Models by name: a folder of this machine, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

from worker.wire.retry import Unavailable, may_heal

_COMMIT = re.compile(r"[0-9a-f]{40}")


def at_revision(model: str, revision: str) -> str:
    """The name by which files of a model are asked for: ORGANIZATION/NAME@REVISION on the Hub.

    One name for both, so that nobody who hands it on loses the revision.
    """
    return f"{model}@{revision}" if revision else model


def local_folder(model: str) -> Path | None:
    """The folder that `model` names; None where it is a repository's name.

    Raises:
        Unavailable: it can only be a folder, and there is none.
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
    """A snapshot of a repository's files in the Hub's cache.

    HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and HF_TOKEN work as everywhere.

    Args:
        repository: ORGANIZATION/NAME, or ORGANIZATION/NAME@REVISION.
        files: patterns of their names.
        ignored: patterns of those among them that are left out.

    Raises:
        Unavailable: the Hub cannot be reached or is busy, and the cache has no whole snapshot.
        ValueError: the Hub does not give it to us.
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
    """The commit that the Hub, or else its cache here, has for a name; empty for a folder.

    Raises:
        Unavailable: it cannot be known now.
        ValueError: the Hub does not give it to us, or a revision of a folder is asked for.
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
    """Whether the Hub may give later what it did not give now.

    An answer in the range of 400 is about the request (no such repository, gated, no valid token),
    but for the three that ask to come again.
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
