"""Checks of a model before the fleet starts: whether it exists, and at which commit."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import NamedTuple, TypeVar

from worker.config import EngineConfig, pinned
from worker.models.config.model_config import load_model_config
from worker.protocol.retry import Unavailable
from worker.rank.preflight import check_engine

T = TypeVar("T")

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 2
"""Timeout in seconds of a Hub request for one file, including name resolution: a mistyped name is
reported within three seconds. HF_HUB_ETAG_TIMEOUT, huggingface_hub's variable for such requests,
overrides it."""
PIN_TIMEOUT_S = 20
"""Timeout in seconds for resolving a model's revisions to commits, less than huggingface_hub's
timeouts and retries. After this time, gateways and workers resolve branches themselves."""
_QUESTION = "What is 12 + 30?"
HTTP_TOO_MANY_REQUESTS = 429
HTTP_SERVER_ERROR = 500


class Example(NamedTuple):
    """Example request to a model."""

    route: str
    fields: Mapping[str, object]
    """The body without the model's name."""


CHAT = Example(
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": _QUESTION}], "stream": True},
)


def with_commits(engine: EngineConfig) -> EngineConfig:
    """`engine` with the branches of its Hub repositories replaced by their current commits.

    Gateways and workers download files at different times: if a branch moved in between, tokenizer
    and weights would not match. If the Hub is not reachable, as on a head node without network, the
    branches are kept and a warning is logged.
    """
    if not all(Path(model).expanduser().is_dir() for model in _models(engine)):
        # Imported before the timeout starts, since the import is slow on a busy machine.
        from huggingface_hub import snapshot_download  # noqa: F401
    try:
        return _in_time(lambda: pinned(engine), PIN_TIMEOUT_S)
    except (ValueError, OSError) as error:
        logger.warning(
            "cannot pin %s to a commit, so gateways and workers may load different versions: %s",
            engine.checkpoint,
            " ".join(str(error).split()),
        )
        return engine


def _models(engine: EngineConfig) -> tuple[str, ...]:
    draft = engine.speculative.model if engine.speculative is not None else ""
    return (engine.model, *((draft,) if draft else ()))


def check_model(engine: EngineConfig) -> None:
    """Checks that a model and its draft model exist, and that their config.json is supported with
    this configuration.

    HTTP errors 429 and 5xx from the Hub raise no error, since workers retry.

    Raises:
        ValueError: a model is missing or not supported, or the Hub is not reachable and a model is
            not cached; the message includes the remedy.
    """
    weights = engine.load_format != "dummy"
    require_model(engine.model, engine.revision, weights=weights)
    draft = engine.speculative
    if draft is not None and draft.model:
        require_model(draft.model, draft.revision, weights=weights)
    if all(Path(model).expanduser().is_dir() for model in _models(engine)):
        check_engine(engine)
        return
    try:
        _in_time(lambda: check_engine(engine), PIN_TIMEOUT_S)
    except (Unavailable, OSError) as error:
        logger.warning("skipped the model check before startup: %s", " ".join(str(error).split()))


def example_request(engine: EngineConfig) -> Example:
    """An example request to a checked model: a chat, or a text to embed or classify."""
    try:
        pooling = _in_time(
            lambda: (
                load_model_config(engine.checkpoint, weights=False, pooling=engine.pooling).pooling
            ),
            HUB_TIMEOUT_S,
        )
    except (ValueError, OSError):  # not known yet: the Hub cannot be reached
        return CHAT
    if pooling is None:
        return CHAT
    route = "/v1/embeddings" if pooling.info.task == "embed" else "/classify"
    return Example(route, {"input": _QUESTION})


def require_model(model: str, revision: str = "", *, weights: bool = True) -> None:
    """Checks that `model` is a checkpoint's folder or a model on the Hub.

    HTTP errors 429 and 5xx from the Hub raise no error, since workers retry.

    Args:
        model: folder, or Hub repository as ORGANIZATION/NAME.
        revision: branch, tag or commit of the repository; empty for the main branch.
        weights: whether a folder must contain weights.

    Raises:
        ValueError: `model` is neither, or the Hub is not reachable and `model` is not cached; the
            first line of the message is the problem, the second the remedy.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision:
            raise ValueError(
                f"revision {revision} is not supported for a folder: {model}\n"
                "remove --revision, or use a Hub repository as ORGANIZATION/NAME"
            )
        _require_files(folder, weights)
    elif model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ValueError(
            f"folder {model} does not exist\n"
            "use a folder with config.json and *.safetensors, or a Hub repository as "
            "ORGANIZATION/NAME"
        )
    else:
        _require_repository(model, revision)


def _require_files(folder: Path, weights: bool) -> None:
    from worker.models.config.checkpoint import check_format, weight_files

    if not (folder / "config.json").is_file():
        check_format(folder)
        raise ValueError(
            f"folder {folder} has no config.json\n"
            "use a folder written by transformers' save_pretrained or `hf download`"
        )
    if weights:
        weight_files(folder)


def _require_repository(repository: str, revision: str) -> None:
    from huggingface_hub import constants, errors, is_offline_mode, try_to_load_from_cache

    hub = constants.ENDPOINT
    try:
        found = try_to_load_from_cache(repository, "config.json", revision=revision or None)
        cached = isinstance(found, str)
        if is_offline_mode():
            if cached:
                return
            raise ValueError(
                f"{repository} is not in the Hub cache at {constants.HF_HUB_CACHE}, and "
                "HF_HUB_OFFLINE is set\n"
                f"unset it, or run `hf download {repository}` on a machine with network access "
                "and copy the cache"
            )
        _request_metadata(repository, revision)
    except errors.HFValidationError as error:
        raise ValueError(
            f"{repository} is neither an existing folder nor a valid Hub repository name\n"
            f"use a folder, or a repository as ORGANIZATION/NAME: {' '.join(str(error).split())}"
        ) from error
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{repository} is gated: access requires accepting its terms on the Hub\n"
            f"accept them at {hub}/{repository}, and set HF_TOKEN to a token of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(
            f"Hub repository {repository} has no revision {revision}\n"
            f"use an existing branch, tag or commit: {hub}/{repository}/commits"
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise ValueError(
            f"Hub repository {repository} has no config.json\n"
            "use a repository in Hugging Face format with safetensors (GGUF and Mistral's "
            "params.json are not supported; for Mistral Large 3, use a checkpoint converted to "
            "Mistral4ForCausalLM)"
        ) from error
    except errors.HfHubHTTPError as error:
        _raise_for_status(repository, hub, error.response.status_code)
    except ConnectionError as error:
        if cached:
            return  # workers load it from the cache
        raise ValueError(
            f"{repository} is not a folder, and the Hub at {hub} is not reachable: {error}\n"
            "check the network (HTTPS_PROXY, HF_ENDPOINT), set HF_HUB_ETAG_TIMEOUT=10 for a longer "
            "timeout, or use a folder"
        ) from error


def _raise_for_status(repository: str, hub: str, status: int) -> None:
    from huggingface_hub import get_token

    if status == HTTP_TOO_MANY_REQUESTS or status >= HTTP_SERVER_ERROR:
        return
    if status in (401, 403) and get_token() is not None:
        raise ValueError(
            f"the Hugging Face token has no access to {repository} (HTTP {status})\n"
            f"check the repository name, and check at {hub}/settings/tokens that the token is "
            "valid and may read this repository; public models need no token"
        )
    raise ValueError(
        f"no public model {repository} on the Hub (HTTP {status})\n"
        "check the name; for a private model set HF_TOKEN to a token with access"
    )


def find_hub_problem() -> tuple[str, str | None]:
    """URL of the Hub, and the reason why the Hub is not reachable; the reason is None if it is
    reachable."""
    from huggingface_hub import constants, get_session, is_offline_mode

    if is_offline_mode():
        return constants.ENDPOINT, "HF_HUB_OFFLINE is set"
    try:
        _within_timeout(lambda timeout_s: get_session().head(constants.ENDPOINT, timeout=timeout_s))
    except ConnectionError as error:
        return constants.ENDPOINT, str(error)
    return constants.ENDPOINT, None


def _request_metadata(repository: str, revision: str) -> None:
    """Requests the metadata of a repository's config.json from the Hub.

    Raises:
        HfHubHTTPError: the Hub returned an error.
        ConnectionError: the Hub did not respond in time, or the request failed for another reason.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repository, "config.json", revision=revision or None)
    _within_timeout(lambda timeout_s: get_hf_file_metadata(url, timeout=timeout_s))


def _within_timeout(request: Callable[[float], object]) -> None:
    """Calls `request` with a timeout in seconds, and stops waiting for it after that time.

    Raises:
        HfHubHTTPError: raised by `request`.
        ConnectionError: `request` raised another exception, or took longer than the timeout.
    """
    from huggingface_hub.errors import HfHubHTTPError

    timeout_s = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or HUB_TIMEOUT_S)
    try:
        _in_time(lambda: request(timeout_s), timeout_s)
    except HfHubHTTPError:
        raise
    except Exception as error:  # the type depends on the HTTP library of huggingface_hub
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConnectionError(reason) from error


def _in_time(request: Callable[[], T], timeout_s: float) -> T:
    """Result of `request`, which runs in a thread; raises its exception, or TimeoutError if it
    takes too long."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(request())
        except Exception as error:  # raised again by `result.result()`
            result.set_exception(error)

    # HAZARD: HTTP timeouts do not cover name resolution. The thread is left running.
    threading.Thread(target=run, daemon=True, name="hub-request").start()
    if not wait([result], timeout_s).done:
        raise TimeoutError(f"no response within {timeout_s:g} s")
    return result.result()
