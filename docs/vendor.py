"""JavaScript that pages carry along, from npm's registry: pinned by version and hash, no node needed.

    from docs.vendor import VENDOR, fetch
    folder = fetch("axe-core", "4.14.1", "sha512-…", VENDOR)     # build/vendor/axe-core-4.14.1/package

The integrity is that of a package-lock.json or of `npm view NAME@VERSION dist.integrity`; when it is wrong,
the error shows what came. Proxies are taken from HTTPS_PROXY as everywhere, the registry from
`npm_config_registry`, else from npm's own configuration where there is an npm.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

VENDOR = Path(__file__).resolve().parent.parent / "build" / "vendor"
REGISTRY = "https://registry.npmjs.org"
TRIES = 3
TIMEOUT = 60  # seconds without a byte


class VendorError(Exception):
    """A package that can't be had: one line that says which, why and what to do."""


def fetch(name: str, version: str, integrity: str, into: Path = VENDOR) -> Path:
    """The unpacked folder `package` of an npm tarball, kept in `into`; a second call asks nobody.

    `integrity` is `sha512-` and the tarball's SHA-512 in base64, as npm writes it. Raises VendorError.
    """
    if not integrity.startswith("sha512-"):
        raise VendorError(f"{name}@{version}: its integrity must begin with sha512-, not {integrity[:12]!r}")
    home = into / f"{name.lstrip('@').replace('/', '-')}-{version}"
    if _holds(home, integrity):
        return home / "package"
    url = f"{_registry()}/{urllib.parse.quote(name, safe='@/')}/-/{name.rpartition('/')[2]}-{version}.tgz"
    data = _download(url)
    came = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    if came != integrity:
        raise VendorError(f"{url}: not the file that is pinned: expected {integrity}, got {came}")
    try:
        into.mkdir(parents=True, exist_ok=True)
        _unpack(data, home, integrity, url)
    except OSError as error:
        raise VendorError(f"{name}@{version}: can't write {home}: {error.strerror or error}") from None
    return home / "package"


def _holds(home: Path, integrity: str) -> bool:
    """Whether `home` is a finished copy of this very tarball."""
    try:
        return (home / "integrity").read_text() == integrity and (home / "package").is_dir()
    except OSError:
        return False


def _registry() -> str:
    given = os.environ.get("npm_config_registry", "")  # noqa: SIM112 (npm spells it so)
    if not given and (npm := shutil.which("npm")):
        try:
            asked = subprocess.run(
                [npm, "config", "get", "registry"], capture_output=True, text=True, timeout=20
            )
            given = asked.stdout.strip() if asked.returncode == 0 else ""
        except (OSError, subprocess.TimeoutExpired):
            given = ""
    return (given if given and given.startswith(("http://", "https://")) else REGISTRY).rstrip("/")


def _download(url: str) -> bytes:
    reason = ""
    for _ in range(TRIES):
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
                data: bytes = answer.read()
                return data
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code} {error.reason}"
            if error.code < 500 and error.code != 429:
                break
        except urllib.error.URLError as error:
            reason = str(error.reason)
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
    raise VendorError(
        f"can't download {url}: {reason}; behind a proxy set HTTPS_PROXY, for a mirror npm_config_registry"
    )


def _unpack(data: bytes, home: Path, integrity: str, url: str) -> None:
    """Unpack beside `home` and rename, so that a reader sees all of it or nothing."""
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=f".{home.name}.") as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        try:
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                archive.extractall(fresh, filter="data")
        except tarfile.TarError as error:
            raise VendorError(f"{url}: can't be unpacked: {error}") from None
        if not (fresh / "package").is_dir():
            raise VendorError(f"{url}: holds no folder package/")
        (fresh / "integrity").write_text(integrity)
        if home.exists() and not _holds(home, integrity):
            home.rename(Path(scratch) / "old")
        try:
            fresh.rename(home)
        except OSError:
            if not _holds(home, integrity):  # else another process was first with the same
                raise
