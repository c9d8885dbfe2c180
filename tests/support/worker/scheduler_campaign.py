"""Random operations on a scheduler over a fake device."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tests.support.worker.fake_device import SALT_SEEDS, Harness, adapter_ref, make_submit
from worker.protocol.admission import AdmissionChange, AdmissionOptions
from worker.protocol.blocks import cache_scope
from worker.protocol.messages import Submit
from worker.protocol.pooling import PoolingParams
from worker.protocol.slo import Slo

SALTS = ("", "a", "b")
TENANTS = ("", "x", "y")


def random_submit(
    rng: random.Random, request_id: str, limit: int, *, with_adapters: bool = False
) -> Submit:
    """Prompts from few families, so that prefixes are shared, in part and in full."""
    family, salt = rng.randrange(3), rng.randrange(len(SALTS))
    is_pooled = request_id.endswith("7")
    length = rng.randint(1, limit - 1)
    length += is_pooled and length == limit - 1
    shared = rng.randint(0, length)
    prompt = [3 + (family + i) % 7 for i in range(shared)]
    prompt += [rng.randrange(50) for _ in range(length - shared)]
    max_tokens = rng.choice([None, 1, 2, 5, 20, 40])
    adapter = None
    if with_adapters and rng.random() < 0.8:
        adapter = adapter_ref(rng.choice([-1, 0, 0, 0, 1, 1, 2, 3, 4]))
    return make_submit(
        request_id,
        prompt,
        seed=salt * SALT_SEEDS + rng.randrange(2),
        cache_salt=cache_scope(SALTS[salt], adapter.version if adapter else ""),
        adapter=adapter,
        priority=rng.choice([4, 4, 4, 0, 9, 7]),
        slo=rng.choice([None, None, Slo(ttft_ms=50.0), Slo(tpot_ms=5.0, e2e_ms=300.0)]),
        tenant=rng.choice(TENANTS),
        waited_ms=rng.choice([0.0, 20.0]),
        gateway_id=f"g{rng.randrange(2)}",
        max_tokens=max_tokens,
        min_tokens=0 if max_tokens is None else rng.randint(0, max_tokens),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=(5,) if rng.random() < 0.2 else (),
        num_resumed=rng.randrange(length) if rng.random() < 0.1 and not is_pooled else 0,
        pooling=PoolingParams() if is_pooled else None,
    )


def random_admission(rng: random.Random) -> dict[str, Any]:
    """A value for every field of AdmissionOptions, so that no new field is left out."""
    hints = get_type_hints(AdmissionOptions)
    return {
        option.name: rng.choice(_choices(hints[option.name], option.name, option.default))
        for option in fields(AdmissionOptions)
    }


def _choices(kind: Any, name: str, default: Any) -> list[Any]:
    if get_origin(kind) is Literal:
        return [*get_args(kind)]
    if kind is float:
        return [0.1, 0.5, 1.0]
    assert kind is int, f"the campaign has no values for {name}, of type {kind}"
    return [value for value in (0, 1, 2, 3, 7, default) if _is_valid(name, value)]


def _is_valid(name: str, value: Any) -> bool:
    try:
        AdmissionOptions(**{name: value})
    except ValueError:
        return False
    return True


class Campaign:
    """Random operations on a Harness; records which requests were aborted or replaced."""

    def __init__(self, rng: random.Random, harness: Harness) -> None:
        self.rng = rng
        self.harness = harness
        self.limit = harness.config.max_total_tokens
        self.with_adapters = harness.config.max_loras > 0
        self.count = 0
        self.alive: list[tuple[str, int]] = []
        self.ended: set[tuple[str, int]] = set()

    def submit(self) -> None:
        self.count += 1
        submit = self._random_submit(f"r{self.count}")
        self.harness.submit(submit)
        self.alive.append((submit.request_id, 0))

    def abort(self) -> None:
        self._forget_finished()
        if self.alive:
            request_id, attempt = self.alive.pop(self.rng.randrange(len(self.alive)))
            self.ended.add((request_id, attempt))
            self.harness.scheduler.abort(request_id, attempt)
            self.harness.check()

    def unknown_requests(self) -> None:
        """Sends aborts and submits that must change nothing."""
        self.harness.scheduler.abort("nobody", 0)
        self._forget_finished()
        if self.alive:
            request_id, attempt = self.rng.choice(self.alive)
            self.harness.scheduler.abort(request_id, attempt - 1)
            self.harness.submit(self.harness.outcomes[request_id, attempt].submit)

    def replace(self) -> None:
        self._forget_finished()
        if self.alive:
            index = self.rng.randrange(len(self.alive))
            request_id, attempt = self.alive[index]
            self.ended.add((request_id, attempt))
            submit = self._random_submit(request_id)
            submit.attempt = attempt + 1
            self.alive[index] = (request_id, submit.attempt)
            self.harness.submit(submit)

    def evict(self) -> None:
        """Evicts as if pages were scarce."""
        cache = self.harness.scheduler.state.cache
        count, blocks = self.rng.randint(1, 6), cache._blocks
        if blocks is None:
            cache.evict(count)
        else:
            blocks.evict(cache._tree.evict(count // 3))
            blocks.reclaim(cache._pages.num_free + count, ends=self.rng.random() < 0.5)
        self.harness.check()

    def change(self) -> None:
        """Changes the admission rules."""
        self.harness.scheduler.set_admission(AdmissionChange(random_admission(self.rng)))

    def wait(self) -> None:
        """Advances the clock, so that deadlines approach."""
        self.harness.now += self.rng.choice([0.001, 0.02, 0.5])

    def finish(self, depth: int) -> None:
        self.harness.drain(depth)
        self.harness.check_drained()
        for (request_id, attempt), outcome in self.harness.outcomes.items():
            if outcome.rejection is not None:
                assert outcome.finish_reason == "error"
                assert not outcome.tokens, "turned away though it had begun"
                if outcome.rejection.status == 500:
                    assert outcome.submit.adapter == adapter_ref(-1)
                    continue
                assert self.harness.config.max_queued_requests, "there was no limit"
            elif (request_id, attempt) in self.ended:
                assert outcome.finish_reason in ("abort", None)
            else:
                self.harness.finished(request_id, attempt)

    def _random_submit(self, request_id: str) -> Submit:
        return random_submit(self.rng, request_id, self.limit, with_adapters=self.with_adapters)

    def _forget_finished(self) -> None:
        self.harness.report()
        outcomes = self.harness.outcomes
        self.alive = [key for key in self.alive if outcomes[key].finish_reason is None]
