"""The account of a request: whose it is, what its key may ask for, and what it has used."""

from __future__ import annotations

import asyncio
import hashlib

from starlette.requests import Request
from starlette.types import Scope

from router.config import ModelRoute, Tenancy
from router.errors import ApiError, unknown_model
from router.keys import KeyEntry, KeyUse
from router.serving import ServedModel
from worker.wire.messages import DEFAULT_PRIORITY

_IN_SCOPE = "rayfleet.account"


class Account:
    """The account of one request: made where its key is found, filled while it is served, read by
    the audit log.

    Args:
        use: of the key; None where anybody is let in.
        num_keys: how many there are.
    """

    __slots__ = (
        "cached_tokens",
        "generated_tokens",
        "is_held",
        "model",
        "num_keys",
        "prompt_tokens",
        "request_id",
        "use",
    )

    def __init__(self, use: KeyUse | None = None, num_keys: int = 0) -> None:
        self.use = use
        self.num_keys = num_keys
        self.request_id = ""
        self.model = ""
        """Name of the model that it asks; empty until it is known."""
        self.is_held = False
        """Whether it goes on behind its answer, and is to be ended by that, too."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0

    @property
    def key(self) -> KeyEntry | None:
        """The key that let it in."""
        return self.use.entry if self.use is not None else None

    @property
    def name(self) -> str:
        """The key's; empty without one."""
        return self.use.entry.name if self.use is not None else ""

    def begin(self) -> None:
        """Counts a request against the key's limits. Raises ApiError (429) where it has to wait."""
        if self.use is not None:
            reached = self.use.begin(asyncio.get_running_loop().time())
            if reached is not None:
                raise reached

    def end(self) -> None:
        """The request has been answered; where it is held, the first of two calls ends nothing."""
        if self.is_held:
            self.is_held = False
        elif self.use is not None:
            self.use.end()

    def may_use(self, route: ModelRoute) -> bool:
        """Whether the key, if there is one, may use a model."""
        return self.key is None or self.key.may_use(*route.names)

    def let_use(self, model: ServedModel) -> None:
        """Notes the model. Raises ApiError: the key may not use it."""
        if not self.may_use(model.route):
            raise unknown_model(model.route.name)
        self.model = model.route.name

    def priority(self, asked: int | None) -> int:
        """The priority that the request is served with.

        Args:
            asked: by the client, None for nothing.

        Raises:
            ApiError: 403, it is more urgent than the key may be.
        """
        most = self.key.max_priority if self.key is not None else None
        if asked is None:
            return DEFAULT_PRIORITY if most is None else min(DEFAULT_PRIORITY, most)
        if most is not None and asked > most:
            raise ApiError(
                403,
                f"priority {asked} is above {most}, the most that this API key may ask for",
                param="priority",
                code="priority_not_allowed",
            )
        return asked

    def check_slo(self, is_asked: bool) -> None:
        """Raises ApiError (403) where an SLO is asked for and the key may have none."""
        if is_asked and self.key is not None and not self.key.slo:
            raise ApiError(
                403, "this API key may not ask for an SLO", param="slo", code="slo_not_allowed"
            )

    def tenant(self, user: str | None, by: Tenancy) -> str:
        """A short name for the API key, or for the key and the request's `user`; empty for none.

        Keys are not to travel to workers, nor to appear in logs: it is the name that the key was
        given, or a digest.
        """
        if by == "none" or (by == "auto" and self.num_keys < 2):
            return ""
        if by != "user":
            return self.name
        # Lengths keep ("ab", "c") and ("a", "bc") apart.
        text = "".join(f"{len(part)}:{part}" for part in (self.name, user or ""))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def spend_prompt(self, num_tokens: int) -> None:
        """The request's prompts are with a worker: charges their tokens."""
        self.prompt_tokens = num_tokens
        self._spend(num_tokens)

    def spend_generated(self, num_tokens: int, num_cached: int) -> None:
        """Books the tokens that were generated, and how much of the prompts was cached."""
        self.generated_tokens, self.cached_tokens = num_tokens, num_cached
        self._spend(num_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that tell what is left of the key's rates; none where it has none."""
        if self.use is None:
            return []
        return self.use.headers(asyncio.get_running_loop().time())

    def _spend(self, num_tokens: int) -> None:
        if self.use is not None and num_tokens:
            self.use.spend(num_tokens, asyncio.get_running_loop().time())


def attach(scope: Scope, account: Account) -> None:
    """Makes it the account of the request that `scope` is of."""
    scope[_IN_SCOPE] = account


def account_of(request: Request) -> Account:
    """The account of a request; an empty one where nobody asks for keys."""
    account = request.scope.get(_IN_SCOPE)
    if not isinstance(account, Account):
        account = Account()
        attach(request.scope, account)
    return account
