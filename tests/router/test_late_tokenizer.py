"""A gateway whose tokenizer is not available yet."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from router.config import GatewayConfig, ModelRoute
from router.gateway import Gateway
from tests.support.router.stub_worker import StubTransport
from worker.protocol import retry
from worker.protocol.retry import StartDelay, Unavailable


def gateway_of(folder: Path, retry_s: float) -> Gateway:
    route = ModelRoute(name="late", model=str(folder))
    return Gateway(
        GatewayConfig(models=(route,), startup_retry_s=retry_s), {"late": StubTransport()}
    )


async def test_it_waits_for_the_folder_and_says_so(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "FIRST_DELAY_S", 0.05)
    folder = tmp_path / "late"
    gateway = gateway_of(folder, math.inf)
    reasons: list[str] = []

    def bring_more(delay: StartDelay | None) -> None:
        """First a folder without a tokenizer, then the complete one."""
        if delay is None:
            reasons.append("started")
            return
        reasons.append(delay.reason)
        if not folder.exists():
            folder.mkdir()
        else:
            shutil.copytree(checkpoint, folder, dirs_exist_ok=True)

    gateway.report = bring_more
    await gateway.start()
    assert [model.route.name for model in gateway.models] == ["late"]
    assert len(reasons) == 3
    assert "does not exist" in reasons[0]
    assert "no tokenizer.json" in reasons[1]
    assert reasons[2] == "started"
    await gateway.close()


async def test_interactive_starts_fail_immediately(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="does not exist"):
        await gateway_of(tmp_path / "late", 0.0).start()


async def test_a_tokenizer_that_cannot_be_read_is_hopeless(
    tmp_path: Path, checkpoint: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(["no", "object"]))
    with pytest.raises(ValueError, match="must contain a JSON object"):
        await gateway_of(tmp_path, math.inf).start()
