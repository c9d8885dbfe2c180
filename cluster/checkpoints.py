"""Checks of a model before anything is started for it: whether it exists, and at which commit."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from worker.config import EngineConfig, pinned
from worker.protocol.retry import Unavailable
from worker.rank.preflight import check_engine

T = TypeVar("T")

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 2
"""Seconds to wait for the Hub's answer about one file, name resolution included: a mistyped name is
told within three seconds of the command. HF_HUB_ETAG_TIMEOUT, huggingface_hub's own variable for
such requests, overrides it."""
PIN_TIMEOUT_S = 20
"""Seconds to wait for the Hub to tell a model's commits: less than huggingface_hub's own timeouts
and retries take. After it gateways and workers resolve branches themselves."""
HTTP_TOO_MANY_REQUESTS = 429
HTTP_SERVER_ERROR = 500


def with_commits(engine: EngineConfig) -> EngineConfig:
    """`engine` with its Hub repositories' branches replaced by the commits that they have now.

    Gateways and workers download files at different times, some long after others: if a branch
    moved meanwhile, tokenizer and weights would not belong together. Where the Hub does not answer,
    as on a head without network, the branches stay, and a warning is logged.
    """
    if not all(Path(model).expanduser().is_dir() for model in _models(engine)):
        # Imported before the timeout starts: on a busy machine the import alone takes long.
        from huggingface_hub import snapshot_download  # noqa: F401
    try:
        return _in_time(lambda: pinned(engine), PIN_TIMEOUT_S)
    except (ValueError, OSError) as error:
        logger.warning(
            "each gateway and worker reads %s as it finds it, held to no common commit: %s",
            engine.checkpoint,
            " ".join(str(error).split()),
        )
        return engine


def _models(engine: EngineConfig) -> tuple[str, ...]:
    return (engine.model, *((engine.speculative_model,) if engine.speculative_model else ()))


def check_model(engine: EngineConfig) -> None:
    """Checks a model, and its draft model, as far as files allow before anything is started: both
    exist, and their config.json can be served with this configuration.

    Nothing is raised while the Hub fails: workers try again.

    Raises:
        ValueError: a model is missing or cannot be served; the message says what to do.
    """
    weights = engine.load_format != "dummy"
    refuse_missing_model(engine.model, engine.revision, weights=weights)
    if engine.speculative_model:
        refuse_missing_model(engine.speculative_model, engine.speculative_revision, weights=weights)
    if all(Path(model).expanduser().is_dir() for model in _models(engine)):
        check_engine(engine)
        return
    try:
        _in_time(lambda: check_engine(engine), PIN_TIMEOUT_S)
    except (Unavailable, OSError) as error:
        logger.warning("not checked before the start: %s", " ".join(str(error).split()))


def refuse_missing_model(model: str, revision: str = "", *, weights: bool = True) -> None:
    """Raises ValueError where `model` is neither a checkpoint's folder nor a model of the Hub.

    The first line of the text says what is wrong, the second what to do about it. Where the Hub
    fails (429, 5xx) nothing is raised: workers ask it again.

    Args:
        model: a folder, or a repository of the Hub as ORGANIZATION/NAME.
        revision: branch, tag or commit of the repository; empty for its main branch.
        weights: whether a folder must hold weights, too.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision:
            raise ValueError(
                f"{model} is a folder, which has no revision {revision}\n"
                "leave the revision out, or name a Hub repository as ORGANIZATION/NAME"
            )
        _refuse_empty_folder(folder, weights)
    elif model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ValueError(
            f"there is no folder {model}\n"
            "name a folder with config.json and *.safetensors, or a Hub repository as "
            "ORGANIZATION/NAME"
        )
    else:
        _refuse_missing_repository(model, revision)


def _refuse_empty_folder(folder: Path, weights: bool) -> None:
    from worker.models.config.checkpoint import weight_files

    if not (folder / "config.json").is_file():
        raise ValueError(
            f"no checkpoint at {folder}: there is no config.json\n"
            "name a folder as transformers' save_pretrained or `hf download` writes it"
        )
    if weights:
        weight_files(folder)


def _refuse_missing_repository(repository: str, revision: str) -> None:
    from huggingface_hub import constants, errors, is_offline_mode, try_to_load_from_cache

    hub = constants.ENDPOINT
    try:
        found = try_to_load_from_cache(repository, "config.json", revision=revision or None)
        cached = isinstance(found, str)
        if is_offline_mode():
            if cached:
                return
            raise ValueError(
                f"{repository} is not in the Hub's cache at {constants.HF_HUB_CACHE}, and "
                "HF_HUB_OFFLINE forbids to ask the Hub\n"
                f"unset it, or run `hf download {repository}` where there is a network and bring "
                "that folder here"
            )
        _ask_hub(repository, revision)
    except errors.HFValidationError as error:
        raise ValueError(
            f"{repository} is neither a folder here nor a name that the Hub could know\n"
            f"name a folder, or a repository as ORGANIZATION/NAME: {' '.join(str(error).split())}"
        ) from error
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{repository} is gated: the Hub gives it to those who have accepted its terms\n"
            f"accept them at {hub}/{repository}, and set HF_TOKEN to a token of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(
            f"{repository} on the Hub has no revision {revision}\n"
            f"name a branch, tag or commit of {hub}/{repository}/commits"
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise ValueError(
            f"{repository} on the Hub holds no config.json\n"
            "name a repository in Hugging Face layout with safetensors (GGUF cannot be served)"
        ) from error
    except errors.HfHubHTTPError as error:
        _refuse_by_status(repository, hub, error.response.status_code)
    except ConnectionError as error:
        if cached:
            return  # workers will find the model in the cache
        raise ValueError(
            f"{repository} is no folder here, and the Hub at {hub} cannot be reached: {error}\n"
            "check the network (HTTPS_PROXY, HF_ENDPOINT; HF_HUB_ETAG_TIMEOUT=10 waits longer), or "
            "name a folder"
        ) from error


def _refuse_by_status(repository: str, hub: str, status: int) -> None:
    from huggingface_hub import get_token

    if status == HTTP_TOO_MANY_REQUESTS or status >= HTTP_SERVER_ERROR:
        return
    if status in (401, 403) and get_token() is not None:
        raise ValueError(
            f"the Hub does not give {repository} to the holder of this token (HTTP {status})\n"
            f"check the name, and what HF_TOKEN may read at {hub}/settings/tokens; a public model "
            "needs none"
        )
    raise ValueError(
        f"the Hub knows no public model {repository} (HTTP {status})\n"
        "check the name; for a private one set HF_TOKEN to a token that may read it"
    )


def find_hub_problem() -> tuple[str, str | None]:
    """URL of the Hub, and the reason why it does not answer; None where it does."""
    from huggingface_hub import constants, get_session, is_offline_mode

    if is_offline_mode():
        return constants.ENDPOINT, "HF_HUB_OFFLINE is set"
    try:
        _within_timeout(lambda timeout_s: get_session().head(constants.ENDPOINT, timeout=timeout_s))
    except ConnectionError as error:
        return constants.ENDPOINT, str(error)
    return constants.ENDPOINT, None


def _ask_hub(repository: str, revision: str) -> None:
    """Asks the Hub for the metadata of a repository's config.json.

    Raises:
        HfHubHTTPError: the Hub answers with an error.
        ConnectionError: the Hub does not answer in time.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repository, "config.json", revision=revision or None)
    _within_timeout(lambda timeout_s: get_hf_file_metadata(url, timeout=timeout_s))


def _within_timeout(ask: Callable[[float], object]) -> None:
    """Calls `ask` with its timeout in seconds.

    Raises:
        HfHubHTTPError: as `ask` raised it.
        ConnectionError: `ask` raised another exception, or took longer.
    """
    from huggingface_hub.errors import HfHubHTTPError

    timeout_s = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or HUB_TIMEOUT_S)
    try:
        _in_time(lambda: ask(timeout_s), timeout_s)
    except HfHubHTTPError:
        raise
    except Exception as error:  # of the HTTP library that huggingface_hub happens to use
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConnectionError(reason) from error


def _in_time(ask: Callable[[], T], timeout_s: float) -> T:
    """The result of `ask`, which runs in a thread; raises its exception, or TimeoutError."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # raised again by `answer.result()`
            answer.set_exception(error)

    # HAZARD: no timeout of HTTP bounds how long the host's name is resolved. The thread stays.
    threading.Thread(target=run, daemon=True, name="ask the Hub").start()
    if not wait([answer], timeout_s).done:
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return answer.result()
