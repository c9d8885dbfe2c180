"""Account: the API key of a request, its permissions, and the tokens that it has used."""

from __future__ import annotations

import hashlib

from starlette.requests import Request
from starlette.types import Scope

from router.config import ModelRoute, Tenancy
from router.errors import ApiError, missing_model, unknown_model
from router.gateway import Gateway
from router.keys import KeyEntry, KeyUse
from router.serving import ServedModel
from worker.protocol.messages import DEFAULT_PRIORITY

_IN_SCOPE = "rayfleet.account"


class Account:
    """The account of one request: made by the check of API keys, filled while the request is
    served, read by the audit log.

    Args:
        use: use of the request's API key; None where no keys are asked for.
        num_keys: number of API keys that the gateway knows.
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
        """Name of the requested model; empty until it is known."""
        self.is_held = False
        """Whether the request runs on in the background after its response, and ends with both."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens found in prefix caches."""
        self.generated_tokens = 0

    @property
    def key(self) -> KeyEntry | None:
        """The request's API key; None where no keys are asked for."""
        return self.use.entry if self.use is not None else None

    @property
    def name(self) -> str:
        """Name of the API key; empty without one."""
        return self.use.entry.name if self.use is not None else ""

    async def begin(self) -> None:
        """Counts the request against the key's limits. Raises ApiError (429) if one is reached."""
        if self.use is not None:
            await self.use.begin()

    def end(self) -> None:
        """Ends the request for the key's limits; a held one with the second of two calls."""
        if self.is_held:
            self.is_held = False
        elif self.use is not None:
            self.use.end()

    def may_use(self, route: ModelRoute) -> bool:
        """Whether the key, if there is one, may use a model."""
        return self.key is None or self.key.may_use(*route.names)

    def permitted(self, gateway: Gateway, name: str | None) -> ServedModel:
        """The model that a body names, noted as the request's.

        Routes call it as soon as the body is decoded, before any other work on it.

        Args:
            gateway: the gateway of the models.
            name: the client's name of the model; None for the only one.

        Raises:
            ApiError: 404 if there is no such model, or the key may not use it; 400 if it must be
                named. Which of the two it is, and other names of the model, do not show.
        """
        model = gateway.model(name)
        if not self.may_use(model.route):
            raise missing_model() if name is None else unknown_model(name)
        self.model = model.route.name
        return model

    def priority(self, asked: int | None) -> int:
        """The priority of the request at the workers.

        Args:
            asked: priority that the client asks for; None for the default.

        Raises:
            ApiError: 403 if the key may not ask for it.
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
        """Raises ApiError (403) if an SLO is asked for and the key may not have one."""
        if is_asked and self.key is not None and not self.key.slo:
            raise ApiError(
                403, "this API key may not ask for an SLO", param="slo", code="slo_not_allowed"
            )

    def tenant(self, user: str | None, by: Tenancy) -> str:
        """Name of the request's tenant; empty for none.

        It is the key's name or a digest, since keys must not get to workers and logs.

        Args:
            user: `user` of the request.
            by: what makes a tenant.
        """
        if by == "none" or (by == "auto" and self.num_keys < 2):
            return ""
        if by != "user":
            return self.name
        # Lengths keep ("ab", "c") and ("a", "bc") apart.
        text = "".join(f"{len(part)}:{part}" for part in (self.name, user or ""))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def spend_prompt(self, num_tokens: int) -> None:
        """Charges the tokens of the request's prompts, which are at workers."""
        self.prompt_tokens = num_tokens
        self._spend(num_tokens)

    def spend_generated(self, num_tokens: int, num_cached: int) -> None:
        """Charges generated tokens, and notes how many prompt tokens were cached."""
        self.generated_tokens, self.cached_tokens = num_tokens, num_cached
        self._spend(num_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Rate-limit headers (x-ratelimit-*) of the key; empty without limits."""
        if self.use is None:
            return []
        return self.use.headers()

    def _spend(self, num_tokens: int) -> None:
        if self.use is not None and num_tokens:
            self.use.spend(num_tokens)


def attach(scope: Scope, account: Account) -> None:
    """Puts the account of a request into its ASGI scope."""
    scope[_IN_SCOPE] = account


def account_of(request: Request) -> Account:
    """The account of a request; a new one where no keys are asked for."""
    account = request.scope.get(_IN_SCOPE)
    if not isinstance(account, Account):
        account = Account()
        attach(request.scope, account)
    return account
