"""TLS certificate of the endpoint: checks the files of `--ssl-certfile` and `--ssl-keyfile`, joins
them into the one file that HAProxy reads, and replaces it in HAProxy when they are renewed.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from cluster.haproxy import CERTIFICATE_VARIABLE
from cluster.haproxy_admin import ask

NODES_SERVE_TLS = (
    "--ssl-certfile is for a fleet that this command starts; the proxies of a running cluster are "
    f"set up on its nodes: set {CERTIFICATE_VARIABLE} to a PEM file with certificate chain and key "
    "where `ray start` runs, or end TLS in front of the fleet (Ingress, load balancer)"
)
"""Why `--ssl-certfile` is rejected on a cluster that others start, with the remedy."""
BUNDLE = "tls.pem"
"""Name of the joined file in the fleet's private directory."""


def check_certificate(certfile: str, keyfile: str) -> None:
    """Loads a certificate chain and its private key, to reject what HAProxy could not serve.

    Args:
        certfile: PEM file of the certificate chain, leaf first; may hold the key as well.
        keyfile: PEM file of the private key; empty when it is in `certfile`.

    Raises:
        ValueError: a file is missing or not PEM, the key is encrypted or of another certificate.
    """
    for path in filter(None, (certfile, keyfile)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read {path} ({error.strerror}): check the path") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certfile, keyfile or None, password=_reject_encrypted_key)
    except (ssl.SSLError, ValueError) as error:
        names = f"{certfile} and {keyfile}" if keyfile else certfile
        raise ValueError(
            f"{names}: {_reason(error)}. --ssl-certfile must be a PEM file with the certificate "
            "chain, --ssl-keyfile a PEM file with its private key, which is not encrypted"
        ) from error


def write_bundle(certfile: str, keyfile: str, directory: Path) -> Path:
    """Writes chain and key into `directory`/tls.pem, readable by its owner alone; returns it."""
    texts = [Path(path).read_text().strip() for path in filter(None, (certfile, keyfile))]
    path = directory / BUNDLE
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write("\n".join([*texts, ""]))
    return path


class Certificate:
    """The certificate files of a fleet whose HAProxy runs on this machine.

    Args:
        certfile: PEM file of the certificate chain.
        keyfile: PEM file of the private key; empty when it is in `certfile`.
        directory: the fleet's private directory, in which HAProxy has its own.
    """

    def __init__(self, certfile: str, keyfile: str, directory: Path) -> None:
        self._files = (certfile, keyfile)
        self._directory = directory
        self._read = self._versions()
        self.bundle = write_bundle(certfile, keyfile, directory)

    def refresh(self) -> bool:
        """Has HAProxy serve the files' current content if they changed; returns whether they did.

        New connections get the new certificate; established ones stay. HAProxy processes that start
        later read the joined file, which is replaced as well.

        Raises:
            ValueError: the new files cannot be served; the ones before stay in use.
        """
        versions = self._versions()
        if versions == self._read:
            return False
        self._read = versions
        check_certificate(*self._files)
        self.bundle = write_bundle(*self._files, self._directory)
        payload = b"set ssl cert %s <<\n%s\n" % (
            os.fsencode(self.bundle),
            b"".join(line for line in self.bundle.open("rb") if line.strip()),
        )
        for admin_socket in self._directory.glob("haproxy/[0-9]*.sock"):
            ask(admin_socket, payload)
            ask(admin_socket, b"commit ssl cert %s" % os.fsencode(self.bundle))
        return True

    def _versions(self) -> list[tuple[int, int] | None]:
        """Inode and modification time (ns) of each file; None where there is none."""
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
    """The reason in OpenSSL's words, without its library and line number."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return str(error)
