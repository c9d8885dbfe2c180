"""TLS certificate of the endpoint: checks the files of `--ssl-certfile` and `--ssl-keyfile`,
combines them into the file that HAProxy reads, and updates HAProxy when they are renewed.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from cluster.haproxy import CERTIFICATE_VARIABLE
from cluster.haproxy_admin import query

NODES_SERVE_TLS = (
    "--ssl-certfile is not supported with --address, since proxies of a running cluster are "
    f"configured on its nodes: set {CERTIFICATE_VARIABLE} to a PEM file with certificate chain and "
    "key when running `ray start`, or terminate TLS in front of the fleet (Ingress, load balancer)"
)
"""Error message for `--ssl-certfile` on a running cluster."""
BUNDLE = "tls.pem"
"""Name of the combined file in the fleet's private directory."""


def check_certificate(certfile: str, keyfile: str) -> None:
    """Checks that a certificate chain and its private key can be loaded by HAProxy.

    Args:
        certfile: PEM file of the certificate chain, leaf first; may contain the key as well.
        keyfile: PEM file of the private key; empty when it is in `certfile`.

    Raises:
        ValueError: a file is missing or not PEM, or the key is encrypted or does not match.
    """
    for path in filter(None, (certfile, keyfile)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read {path} ({error.strerror}): check the path") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without the callback OpenSSL would prompt for a password on the terminal.
        context.load_cert_chain(certfile, keyfile or None, password=_reject_encrypted_key)
    except (ssl.SSLError, ValueError) as error:
        names = f"{certfile} and {keyfile}" if keyfile else certfile
        raise ValueError(
            f"{names}: {_reason(error)}. --ssl-certfile must be a PEM file with the certificate "
            "chain, --ssl-keyfile a PEM file with its unencrypted private key"
        ) from error


def write_bundle(certfile: str, keyfile: str, directory: Path) -> Path:
    """Writes chain and key to `directory`/tls.pem, readable by its owner only; returns its path."""
    texts = [Path(path).read_text().strip() for path in filter(None, (certfile, keyfile))]
    path = directory / BUNDLE
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write("\n".join([*texts, ""]))
    return path


class Certificate:
    """Certificate files of a fleet with HAProxy on this machine.

    Args:
        certfile: PEM file of the certificate chain.
        keyfile: PEM file of the private key; empty when it is in `certfile`.
        directory: the fleet's private directory, which contains HAProxy's.
    """

    def __init__(self, certfile: str, keyfile: str, directory: Path) -> None:
        self._files = (certfile, keyfile)
        self._directory = directory
        self._loaded = self._versions()
        self.bundle = write_bundle(certfile, keyfile, directory)

    def refresh(self) -> bool:
        """Updates the certificate in HAProxy if the files changed; returns whether they did.

        The new certificate applies to new connections; established ones are kept. HAProxy processes
        started later read the combined file, which is updated as well.

        Raises:
            ValueError: the new files are invalid; the previous ones stay in use.
        """
        versions = self._versions()
        if versions == self._loaded:
            return False
        self._loaded = versions
        check_certificate(*self._files)
        self.bundle = write_bundle(*self._files, self._directory)
        payload = b"set ssl cert %s <<\n%s\n" % (
            os.fsencode(self.bundle),
            b"".join(line for line in self.bundle.open("rb") if line.strip()),
        )
        for admin_socket in self._directory.glob("haproxy/[0-9]*.sock"):
            query(admin_socket, payload)
            query(admin_socket, b"commit ssl cert %s" % os.fsencode(self.bundle))
        return True

    def _versions(self) -> list[tuple[int, int] | None]:
        """Inode and modification time (ns) of each file; None if it does not exist."""
        found: list[tuple[int, int] | None] = []
        for path in filter(None, self._files):
            try:
                status = os.stat(path)
            except OSError:
                found.append(None)
            else:
                found.append((status.st_ino, status.st_mtime_ns))
        return found


def _reject_encrypted_key() -> str:
    raise ValueError("the private key is encrypted")


def _reason(error: Exception) -> str:
    """OpenSSL's reason, without library and line number."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return str(error)
