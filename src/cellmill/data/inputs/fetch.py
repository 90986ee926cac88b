"""Inputs at a URL, fetched once into a cache that jobs share.

    CACHE/0f3a…/cells.h5ad       the file, or the folder of a .zarr
    CACHE/0f3a…/fetched.json     written last: URL, SHA-256 and size
    CACHE/0f3a…/claims/          who fetches it (`cellmill.runs.lock`): others wait, and take over from a dead one

A URL is taken for one file forever: nothing asks whether it has changed. `#sha256=HEX` behind it says which file is
expected. Credentials come from the environment, as the protocol's package reads them; no message has them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import unquote, urldefrag, urlsplit

import fsspec
from fsspec.registry import known_implementations

from cellmill.config.datasets import check_url, is_url, redacted
from cellmill.data.inputs.h5 import one_line
from cellmill.errors import ConfigError, DataError, UserError, did_you_mean
from cellmill.files import atomic_path, digest, fsync, read_json, write_json
from cellmill.runs.lock import Claim, Claimed, claim

CACHE = "CELLMILL_CACHE"
RECORD = ".fetched.json"
_PIECE = 1 << 23  # bytes
_TIMEOUT_S = 30.0  # without a byte
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az", "adl": "az"}
_USUAL = ("s3", "gs", "az", "https", "http", "file", "ftp", "sftp", "hf")
_SHA256 = re.compile(r"sha256=([0-9a-fA-F]{64})")


@dataclass(frozen=True)
class Fetched:
    """A copy in the cache."""

    url: str
    path: Path
    sha256: str  # of a folder over lines of the digests and names of its files
    n_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {"url": self.url, "path": str(self.path), "sha256": self.sha256, "bytes": self.n_bytes}


class _Ready(Exception):
    """Another job has fetched it."""


Opener = Callable[[], IO[bytes]]


def fetch_url(url: str, cache: Path | None = None) -> Fetched:
    """The copy of `url` in `cache` (default: CELLMILL_CACHE, else ~/.cache/cellmill), fetched if it is not there.

    Raises ConfigError for an unknown protocol, a missing package or credentials in the URL, DataError when the URL
    cannot be read or is another file than its `#sha256=`.
    """
    check_url(url)
    address, fragment = urldefrag(url)
    folder = (cache or default_cache()) / digest(address)[:16]
    while (found := _complete(folder, address)) is None:
        with suppress(Claimed, _Ready):
            _fetch_alone(address, folder, _wanted(url, fragment))
    if (wanted := _wanted(url, fragment)) not in (None, found.sha256):
        raise DataError(
            f"{redacted(url)}: expected sha256 {wanted}, got {found.sha256} ({found.path}); if "
            f"the file has changed, remove {folder}"
        )
    return found


def default_cache() -> Path:
    """Folder named by CELLMILL_CACHE, else cellmill's in the user's cache."""
    if named := os.environ.get(CACHE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cellmill"


def read_record(path: Path) -> Fetched:
    """Parse the output of `Fetched.to_json`. Raises DataError."""
    stored = read_json(path)
    try:
        return Fetched(str(stored["url"]), Path(stored["path"]), str(stored["sha256"]), int(stored["bytes"]))
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path}: expected url, path, sha256 and bytes; delete it and run fetch again") from None


def _wanted(url: str, fragment: str) -> str | None:
    if not fragment:
        return None
    if match := _SHA256.fullmatch(fragment):
        return match[1].lower()
    raise ConfigError(f"{redacted(url)}: expected #sha256= and 64 hexadecimal digits behind the URL, or nothing")


def _complete(folder: Path, address: str) -> Fetched | None:
    record = folder / RECORD.removeprefix(".")
    if not record.exists():
        return None
    found = read_record(record)
    path = folder / found.path.name  # the cache may have been moved
    whole = path.is_dir() or (path.is_file() and path.stat().st_size == found.n_bytes)
    return Fetched(address, path.absolute(), found.sha256, found.n_bytes) if whole else None


def _fetch_alone(address: str, folder: Path, wanted: str | None) -> None:
    """Fetch while this job has the folder's claim. Raises _Ready or Claimed if another job fetches it."""

    def wait(_: float) -> None:
        if _complete(folder, address) is not None:
            raise _Ready
        time.sleep(0.2)

    own = claim(folder, f"{os.uname().nodename} process {os.getpid()}", wait)
    try:
        if _complete(folder, address) is None:
            for left in folder.glob(".*.incomplete*"):  # of a job that died
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            _download(address, folder, own, wanted)
    finally:
        own.release()


def _download(address: str, folder: Path, own: Claim, wanted: str | None) -> None:
    target = folder / _name(address)
    with _remote_errors(address):
        files = _remote_files(address)
    if "" in files:
        sha256, size = _copy(address, files[""], target, own, wanted)
    else:
        sha256, size = _copy_folder(address, files, target, own)
    record = Fetched(address, target, sha256, size)
    if wanted not in (None, sha256):
        raise DataError(f"{redacted(address)}: expected sha256 {wanted}, got {sha256}")
    write_json(folder / RECORD.removeprefix("."), record.to_json() | {"url": redacted(address)})


def _copy(address: str, opener: Opener, target: Path, own: Claim, wanted: str | None = None) -> tuple[str, int]:
    """SHA-256 and size of a file that is now at `target`. Raises DataError, and leaves nothing, if not `wanted`."""
    sha256, size = hashlib.sha256(), 0
    with atomic_path(target) as temporary, open(temporary, "wb") as local:
        with _remote_errors(address):
            remote = opener()
        with remote:
            while piece := _read(address, remote):
                own.renew()
                local.write(piece)
                sha256.update(piece)
                size += len(piece)
        if wanted not in (None, sha256.hexdigest()):
            raise DataError(f"{redacted(address)}: expected sha256 {wanted}, got {sha256.hexdigest()}")
        local.flush()
    return sha256.hexdigest(), size


def _copy_folder(address: str, files: dict[str, Opener], target: Path, own: Claim) -> tuple[str, int]:
    """The same for a folder, whose name appears when it is whole."""
    whole, size = hashlib.sha256(), 0
    beside = target.with_name(f".{target.name}.incomplete")
    for name, opener in sorted(files.items()):
        file = beside / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DataError(f"{redacted(address)}: has a file {name!r}, which is outside its folder")
        sha256, n_bytes = _copy(address, opener, file, own)
        whole.update(f"{sha256}  {name}\n".encode())
        size += n_bytes
    if target.exists():
        shutil.rmtree(target)
    beside.rename(target)
    fsync(target.parent)
    return whole.hexdigest(), size


def _remote_files(address: str) -> dict[str, Opener]:
    """Opener of each file by its name below the URL; a URL that is a file has one, named ''."""
    protocol = urlsplit(address).scheme.lower()
    if protocol in ("http", "https"):
        return {"": lambda: _open_http(address)}
    if protocol not in known_implementations and protocol not in fsspec.available_protocols():
        raise ConfigError(f"{redacted(address)}: unknown protocol {protocol!r}; {did_you_mean(protocol, _USUAL)}")
    system, root = fsspec.core.url_to_fs(address)
    if not system.isdir(root):
        return {"": lambda: system.open(root, "rb")}
    names = {path: path[len(root) :].strip("/") for path in system.find(root)}
    if not names:
        raise DataError(f"{redacted(address)}: no such file, or an empty folder")
    return {name: lambda path=path: system.open(path, "rb") for path, name in names.items()}  # type: ignore[misc]


def _open_http(address: str) -> IO[bytes]:
    return urllib.request.urlopen(address, timeout=_TIMEOUT_S)


def _read(address: str, remote: IO[bytes]) -> bytes:
    with _remote_errors(address):
        piece = remote.read(_PIECE)
        if not piece and getattr(remote, "length", None):  # http: fewer bytes than announced
            raise OSError(f"the connection ended {remote.length:,} bytes early")  # type: ignore[attr-defined]
    return piece


def _name(address: str) -> str:
    """Name of the copy, by which its format is recognised."""
    name = PurePosixPath(unquote(urlsplit(address).path.rstrip("/"))).name or urlsplit(address).netloc
    name = re.sub(r"[^\w.+-]", "_", name).lstrip(".")
    return name if name and name != RECORD.removeprefix(".") and name != "claims" else f"data-{name}"


@contextmanager
def _remote_errors(address: str) -> Iterator[None]:
    """Raise one line without credentials for whatever a protocol's package raises."""
    shown, protocol = redacted(address), urlsplit(address).scheme.lower()
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        remedy = f"pip install 'cellmill[{extra}]'" if extra else one_line(error)
        raise ConfigError(f"{shown}: a package for {protocol}:// is missing: {remedy}") from None
    except FileNotFoundError:
        raise DataError(f"{shown}: no such file") from None
    except Exception as error:  # packages of protocols raise errors of their own, some with the URL
        text = re.sub(r"\w[\w+.-]*://\S+", lambda match: redacted(match[0]) if is_url(match[0]) else "", str(error))
        raise DataError(f"{shown}: cannot be fetched: {type(error).__name__}: {' '.join(text.split())[:200]}") from None
