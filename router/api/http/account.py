"""Account: a request's API key, its permissions and its token usage."""

from __future__ import annotations

import hashlib

from starlette.requests import Request
from starlette.types import Scope

from router.api.http.session_id import account_of_user
from router.config import ModelRoute, Tenancy
from router.errors import ApiError, missing_model, unknown_model
from router.gateway import Gateway
from router.keys import KeyEntry, KeyUse
from router.serving import ServedModel
from worker.protocol.messages import DEFAULT_PRIORITY
from worker.protocol.slo import Slo

_IN_SCOPE = "rayfleet.account"


class Account:
    """The account of one request.

    The API key check creates it, request handling updates it, and the audit log reads it.

    Args:
        use: usage of the request's API key; None if no keys are required.
        num_keys: number of API keys of the gateway.
    """

    __slots__ = (
        "adapter",
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
        self.adapter = ""
        """Name of the requested LoRA adapter; empty if there is none."""
        self.is_held = False
        """Whether the request continues in the background after its response; the request ends when
        the response and the background run have ended."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens found in prefix caches."""
        self.generated_tokens = 0

    @property
    def key(self) -> KeyEntry | None:
        """The request's API key; None if no keys are required."""
        return self.use.entry if self.use is not None else None

    @property
    def name(self) -> str:
        """Name of the API key; empty if none is required."""
        return self.use.entry.name if self.use is not None else ""

    async def begin_request(self) -> None:
        """Counts the request against the key's limits. Raises ApiError (429) if one is reached."""
        if self.use is not None:
            await self.use.begin_request()

    def end_request(self) -> None:
        """Stops counting the request as open for the key's limits. A request that continues in the
        background needs two calls: at the end of its response and at its own end."""
        if self.is_held:
            self.is_held = False
        elif self.use is not None:
            self.use.end_request()

    def may_use(self, route: ModelRoute) -> bool:
        """Whether the API key, if any, may use a model."""
        return self.key is None or self.key.may_use(*route.names)

    def names(self, model: ServedModel) -> list[str]:
        """Names of a model and its adapters that the API key, if any, may use.

        A key that lists a model does not give access to its adapters, which may belong to other
        customers, unless it lists them as well.
        """
        names = [*(model.route.names if self.may_use(model.route) else ())]
        key = self.key
        return names + [n for n in model.adapters.names if key is None or key.may_use(n)]

    def permitted(self, gateway: Gateway, name: str | None) -> ServedModel:
        """The requested model, which is also recorded in the account with its adapter.

        Routes call this as soon as the body is decoded, before any other processing.

        Args:
            gateway: the gateway of the models.
            name: model name in the request; None selects the only model.

        Raises:
            ApiError: 404 if there is no such model or the key may not use it, without revealing
                which of the two, or other model names; 400 if the model must be named.
        """
        model = gateway.model(name)
        if name is not None and name in model.adapters:
            if self.key is not None and not self.key.may_use(name):
                raise unknown_model(name)
            self.model = self.adapter = name
            return model
        if not self.may_use(model.route):
            raise missing_model() if name is None else unknown_model(name)
        self.model = model.route.name
        return model

    def priority(self, requested: int | None) -> int:
        """The scheduling priority of the request.

        Args:
            requested: priority that the client requests; None for the default.

        Raises:
            ApiError: 403 if the key does not allow it.
        """
        maximum = self.key.max_priority if self.key is not None else None
        if requested is None:
            return DEFAULT_PRIORITY if maximum is None else min(DEFAULT_PRIORITY, maximum)
        if maximum is not None and requested > maximum:
            raise ApiError(
                403,
                f"priority {requested} exceeds {maximum}, the maximum of this API key",
                param="priority",
                code="priority_not_allowed",
            )
        return requested

    def slo(self, requested: Slo | None) -> Slo | None:
        """The SLO of the request; None if there is none.

        Args:
            requested: SLO that the client requests; one without any limit counts as none.

        Raises:
            ApiError: 403 if the key does not allow it.
        """
        if requested is None or requested.is_empty:
            return None
        if self.key is not None and not self.key.slo:
            raise ApiError(
                403,
                "this API key does not allow SLOs: omit slo",
                param="slo",
                code="slo_not_allowed",
            )
        return requested

    def tenant(self, user: str | None, by: Tenancy) -> str:
        """Name of the request's tenant; empty if tenants are not distinguished.

        It is the key's name, or a digest of the key's name and `user`: the name must not reveal a
        key or user, since it reaches workers and logs.

        Args:
            user: `user` of the request; a session id in it is ignored.
            by: source of the tenant's name, as in `--fairness-key`.
        """
        if by == "none" or (by == "auto" and self.num_keys < 2):
            return ""
        if by != "user":
            return self.name
        # Lengths distinguish ("ab", "c") from ("a", "bc").
        account = account_of_user(user or "")
        text = "".join(f"{len(part)}:{part}" for part in (self.name, account))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def spend_prompt(self, num_tokens: int) -> None:
        """Charges the prompt tokens of the request, once its prompts have been sent to workers."""
        self.prompt_tokens = num_tokens
        self._spend(num_tokens)

    def spend_generated(self, num_tokens: int, num_cached: int) -> None:
        """Charges generated tokens, and records the number of cached prompt tokens."""
        self.generated_tokens, self.cached_tokens = num_tokens, num_cached
        self._spend(num_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Rate-limit headers (x-ratelimit-*) of the key; empty if it has no limits."""
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
    """The account of a request; a new one if no keys are required."""
    account = request.scope.get(_IN_SCOPE)
    if not isinstance(account, Account):
        account = Account()
        attach(request.scope, account)
    return account
