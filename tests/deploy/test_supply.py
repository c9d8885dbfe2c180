"""Locks of images agree with the pins, and the supply check reports what it could not check."""

from __future__ import annotations

import base64
import hashlib
import http.server
import importlib.metadata
import json
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.supply import check, lock
from deploy.supply.index import IndexUnreachableError, Locked, parse_lock, pins, render_lock
from tests.support.paths import ROOT

PINS = pins(ROOT / "constraints.txt")
LOCKS = {device: parse_lock(check.read_device(device)) for device in check.DEVICES}
LINUX = {
    "python_version": "3.11",
    "python_full_version": "3.11.9",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "extra": "",
}
HASH = "0" * 64
VULNERABLE = {"id": "GHSA-1", "fix_versions": ["2.0"]}


def needed(lines: list[str], extra: str = "") -> list[Requirement]:
    """Requirements that apply to an image."""
    found = [Requirement(line) for line in lines]
    environment = {**LINUX, "extra": extra}
    return [one for one in found if one.marker is None or one.marker.evaluate(environment)]


@pytest.mark.parametrize("device", check.DEVICES)
def test_locks_agree_with_the_pins(device: str) -> None:
    [outcome] = check.check_locks(PINS, {device: LOCKS[device]}, ["torch"])
    assert outcome.verdict == "passed", outcome.text
    held = LOCKS[device]
    assert len(set(PINS) & set(held)) > 20
    for name in set(PINS) & set(held):
        assert held[name].version.partition("+")[0] == PINS[name]
    assert all(one.hashes for one in held.values())


@pytest.mark.parametrize("device", check.DEVICES)
def test_locks_hold_all_that_an_image_needs(device: str) -> None:
    """pip rejects packages without a hash, so a missing one would fail the build."""
    held = LOCKS[device]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    optional = project["project"]["optional-dependencies"]
    extras = [one for extra in lock.EXTRAS for one in optional[extra]]
    lines = [*project["project"]["dependencies"], *extras, *project["build-system"]["requires"]]
    queried = {f"rayfleet: {one}": one for one in needed(lines)}
    for name, one in held.items():
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # this environment has torch for one device
        if distribution.version == one.version:
            lines = distribution.requires or []
            queried |= {f"{name}: {other}": other for other in needed(lines)}
    assert len(queried) > 100
    for who, one in queried.items():
        name = canonicalize_name(one.name)
        assert name in held, f"{who} is in no lock: run `make lock`"
        assert one.specifier.contains(held[name].version, prereleases=True), who


def test_only_the_image_for_gpus_has_their_libraries() -> None:
    assert LOCKS["cpu"]["torch"].version.endswith("+cpu")
    assert not [name for name in LOCKS["cpu"] if name.startswith(lock.OF_CUDA)]
    assert "nvidia-nccl-cu13" in LOCKS["cuda"]


@pytest.mark.parametrize("path", sorted(lock.FOLDER.glob("*.txt")), ids=lambda p: p.stem)
def test_locks_name_no_host_and_no_folder(path: Path) -> None:
    text = path.read_text()
    assert "//" not in text
    assert "--" not in text.replace("--hash=sha256:", "")
    assert render_lock(parse_lock(text), "").splitlines() == [
        line for line in text.splitlines() if not line.startswith("#")
    ]


@pytest.mark.parametrize(
    "line",
    [
        "rich==15.0.0\n",
        "rich>=15 \\\n    --hash=sha256:" + HASH + "\n",
        "rich==15.0.0 \\\n    --hash=md5:" + HASH + "\n",
        "rich @ https://example.org/rich.whl \\\n    --hash=sha256:" + HASH + "\n",
        "--index-url https://example.org/simple\n",
        "-r others.txt\n",
    ],
)
def test_a_lock_is_versions_with_hashes_and_nothing_else(line: str) -> None:
    good = render_lock({"six": Locked("1.17.0", (HASH,))}, "a comment")
    assert parse_lock(good) == {"six": Locked("1.17.0", (HASH,))}
    with pytest.raises(ValueError, match="must be name==version with hashes"):
        parse_lock(good + line)


def test_a_lock_that_was_not_written_again_is_found() -> None:
    held = {"ray": Locked("2.59.0", (HASH,)), "torch": Locked("2.13.0+cpu", (HASH,))}
    pinned = {"ray": "2.60.0", "torch": "2.13.0"}
    [outcome] = check.check_locks(pinned, {"cpu": held}, ["rich"])
    assert outcome.verdict == "failed"
    assert "ray 2.59.0 instead of 2.60.0, no rich: run `make lock`" in outcome.text


def audit_with(folder: Path, body: str) -> list[str]:
    """`check.audit` with a fake pip-audit; `queried` is its input."""
    program = folder / "pip-audit"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        "queried = open(sys.argv[-1]).read().split()\n"
        "pairs = [line.split('==') for line in queried]\n"
        f"canary = queried == ['{check.CANARY}']\n"
        f"{body}\n"
    )
    program.chmod(0o700)
    held = {"six": Locked("1.17.0", (HASH,)), "torch": Locked("2.13.0+cpu", (HASH,))}
    return check.audit(str(program), held)


def report(vulns: str, pairs: str = "pairs", key: str = "vulns") -> str:
    return (
        f"found = [dict(name=n, version=v, {key}={vulns}) for n, v in {pairs}]\n"
        "print(json.dumps({'dependencies': found}))"
    )


def test_vulnerabilities_are_reported(tmp_path: Path) -> None:
    assert audit_with(tmp_path, report(f"[{VULNERABLE}] if canary else []")) == []
    found = audit_with(tmp_path, report(f"[{VULNERABLE}] if canary or n == 'torch' else []"))
    assert found == ["torch 2.13.0: GHSA-1, fixed in 2.0"]


@pytest.mark.parametrize(
    "body",
    [
        # An index without such a service: pip-audit then exits with 0 and "no vulnerabilities".
        report("'not found'", key="skip_reason"),
        report("[]"),  # a service without any data
        report(f"[{VULNERABLE}] if canary else []", "pairs[:1]"),
        "sys.exit('no connection')",
        "print('<html>')",
    ],
    ids=["all skipped", "canary unknown", "one is missing", "no answer", "no json"],
)
def test_what_nobody_looked_at_has_not_passed(tmp_path: Path, body: str) -> None:
    with pytest.raises(check.NotAuditedError):
        audit_with(tmp_path, body)
    with pytest.raises(check.NotAuditedError):
        check.audit(str(tmp_path / "none"), {})
    assert check.exit_code(["passed", "not checked"]) == 2
    assert check.exit_code(["passed", "not checked", "failed"]) == 1
    assert check.exit_code(["passed"]) == 0


def test_packages_without_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(check.NotAuditedError, match=r"no data for torch \(1 of 2 packages\)"):
        audit_with(tmp_path, report(f"[{VULNERABLE}] if canary else []", "pairs[:1]"))


def test_images_of_a_release_are_named_by_digest(tmp_path: Path) -> None:
    base, values = tmp_path / "base.env", tmp_path / "values.yaml"
    for digest, verdict in ((f"sha256:{HASH}", "passed"), ("", "failed"), ("sha256:1", "failed")):
        base.write_text(f"PYTHON=3.11-slim-bookworm\nPYTHON_DIGEST={digest}\n")
        assert check.check_base(base).verdict == verdict
        values.write_text(yaml.safe_dump({"image": {"tag": "1", "digest": digest}}))
        assert [one.verdict for one in check.check_values([values])] == [verdict]
    for text in ("", "image:\n", "image: {tag: 1}\n"):
        values.write_text(text)
        assert [one.verdict for one in check.check_values([values])] == ["failed"]
    assert [one.verdict for one in check.check_values([])] == ["not checked"]


class Index(http.server.BaseHTTPRequestHandler):
    """PyTorch's index of one device, with one wheel."""

    wheel: bytes
    name = f"torch-{PINS['torch']}+cpu-py3-none-any.whl"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        digest = hashlib.sha256(self.wheel).hexdigest()
        page = f'<a href="/files/{self.name.replace("+", "%2B")}#sha256={digest}">{self.name}</a>'
        found = {"/whl/cpu/torch/": page.encode()}.get(self.path)
        body = self.wheel if self.path.startswith("/files/") else found
        self.send_response(404 if body is None else 200)
        self.send_header("content-type", "text/html" if found else "application/octet-stream")
        self.send_header("content-length", str(len(body or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body or b"")

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@contextmanager
def pytorch_index(folder: Path) -> Iterator[str]:
    path = folder / Index.name
    info = f"torch-{PINS['torch']}+cpu.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {PINS['torch']}+cpu\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        lines.append(f"{name},sha256={digest.decode()},{len(text)}\n")
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": "".join(lines)}.items():
            archive.writestr(name, text)
    handler = type("Handler", (Index,), {"wheel": path.read_bytes()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/whl/cpu"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_torch_comes_from_pytorchs_index_and_is_kept_where_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setattr(lock, "FOLDER", tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    with pytorch_index(tmp_path) as index:
        lock.update_torch(home, index, {})
        digest = hashlib.sha256((tmp_path / Index.name).read_bytes()).hexdigest()
    assert lock.read("cpu") == {"torch": Locked(f"{PINS['torch']}+cpu", (digest,))}

    (tmp_path / "other").mkdir()
    lock.update_torch(tmp_path / "other", index, {})  # closed: nothing listens on its port
    assert lock.read("cpu")["torch"].hashes == (digest,)
    lock.write("cpu", {"torch": Locked("1.0+cpu", (HASH,))}, "An older one.")
    with pytest.raises(IndexUnreachableError):
        lock.update_torch(tmp_path / "other", index, {})


def test_a_bill_of_materials_has_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fake tool that omits a package."""
    program = tmp_path / "bin" / "cyclonedx-py"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport json, re, sys\n"
        "names = re.findall(r'(?m)^([\\w.-]+)==', sys.stdin.read())\n"
        "parts = [{'name': name} for name in names if name != 'ray']\n"
        "json.dump({'components': parts}, open(sys.argv[sys.argv.index('-o') + 1], 'w'))\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(check, "TOOLS", tmp_path)
    monkeypatch.setattr(check, "SBOMS", tmp_path / "sbom")
    outcome = check.write_sbom("cpu")
    assert (outcome.verdict, outcome.text.rpartition(" lacks ")[2]) == ("failed", "ray")
    assert json.loads((tmp_path / "sbom" / "cpu.cdx.json").read_text())["components"]
