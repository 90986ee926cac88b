"""Inputs at a URL, fetched once into a cache that jobs share.

    CACHE/0f3a…/cells.h5ad       the file, or the folder of a .zarr
    CACHE/0f3a…/fetched.json     written last: URL, SHA-256 and size
    CACHE/0f3a…/lock             held by the job that fetches: others wait

A URL is taken for one file forever; `#sha256=HEX` behind it says which file is expected.
Credentials come from the environment, as the protocol's package reads them; no message has them.
"""

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import fsspec

from cellmill.config.datasets import check_url, is_url, redacted
from cellmill.data.inputs.containers import split_part
from cellmill.data.inputs.h5 import one_line
from cellmill.data.inputs.text.companions import is_matrix, named_tables
from cellmill.data.inputs.text.tables import is_table
from cellmill.errors import ConfigError, DataError, UserError, did_you_mean
from cellmill.files import digest, progress, read_json, sha256_file, user_cache, write_json

CACHE = "CELLMILL_CACHE"
RECORD = ".fetched.json"
_TIMEOUT_S = 30.0  # without a byte
_DEAD_S = 3600.0  # without a byte on disk, for a job that died
_EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "adl": "az",
}
_USUAL = ("s3", "gs", "az", "https", "http", "file", "ftp", "sftp", "hf")


@dataclass(frozen=True)
class Fetched:
    """A copy in the cache."""

    url: str
    path: Path
    sha256: str  # for a folder, over lines of the digests and names of its files
    n_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "path": str(self.path),
            "sha256": self.sha256,
            "bytes": self.n_bytes,
        }


def fetch_url(url: str, cache: Path | None = None) -> Fetched:
    """Return the copy of `url` in `cache`, and fetch it if it is not there.

    The default cache is CELLMILL_CACHE, else ~/.cache/cellmill. Raises ConfigError for an unknown
    protocol, a missing package or credentials in the URL, DataError when the URL cannot be read or is
    another file than its `#sha256=`.
    """
    check_url(url)
    address, fragment = urldefrag(url)
    match = re.fullmatch(r"sha256=([0-9a-fA-F]{64})", fragment)
    if fragment and not match:
        raise ConfigError(
            f"{redacted(url)}: expected #sha256= and 64 hexadecimal digits behind the URL, or nothing"
        )
    wanted = match[1].lower() if match else None
    folder = (cache or Path(os.environ.get(CACHE) or user_cache())) / digest(address)[:16]
    folder.mkdir(parents=True, exist_ok=True)
    fetched = _complete(folder, address)
    if fetched is None:
        with open(folder / "lock", "w") as lock:
            with suppress(OSError):  # where the file system has no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            fetched = _complete(folder, address) or _fetch(address, folder, wanted)
    if wanted not in (None, fetched.sha256):
        raise DataError(
            f"{redacted(url)}: expected sha256 {wanted}, got {fetched.sha256} ({fetched.path}); if "
            f"the file has changed, remove {folder}"
        )
    return fetched


def read_record(path: Path) -> Fetched:
    """Parse the output of `Fetched.to_json`. Raises DataError."""
    stored = read_json(path)
    try:
        return Fetched(
            str(stored["url"]), Path(stored["path"]), str(stored["sha256"]), int(stored["bytes"])
        )
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"{path}: expected url, path, sha256 and bytes; delete it and run fetch again"
        ) from None


def state_of(path: Path) -> list[tuple[str, int, int]]:
    """Return name, bytes and time (ns) of each file of a local input.

    They differ once a file was written; inodes may also change otherwise, where the file system is in
    user space. Tables beside a Matrix Market file belong to it; other files of its folder, such as a
    log or an output, do not.
    """
    files = _files_of(split_part(path)[0])
    if any(map(is_matrix, files)):
        files = [file for file in files if is_matrix(file) or is_table(file)]
    states = [(str(file), file.stat()) for file in files]
    return [(name, state.st_size, state.st_mtime_ns) for name, state in states]


def _files_of(path: Path) -> list[Path]:
    if not path.is_file():
        return sorted(file for file in path.rglob("*") if file.is_file())
    return [path, *named_tables(path)] if is_matrix(path) else [path]


def origin_of(path: Path) -> dict[str, Any]:
    """Name, SHA-256 and size of a local input, for reports; of several files over them by name."""
    path, _ = split_part(path)
    files = _files_of(path)
    if files == [path]:
        return {"file": path.name, "sha256": sha256_file(path), "bytes": path.stat().st_size}
    folder = path if path.is_dir() else path.parent
    whole = hashlib.sha256()
    size = 0
    for file in files:
        whole.update(f"{sha256_file(file)}  {file.relative_to(folder).as_posix()}\n".encode())
        size += file.stat().st_size
    return {"file": path.name, "sha256": whole.hexdigest(), "bytes": size}


def local_input(given: Path | str, cache: Path | None = None) -> Path:
    """Return the local path of an input.

    This is the input itself, the fetched copy of a URL, or the copy that a record of `fetch` names. A
    copy that is gone is fetched again. Raises DataError if it is then another file than the record's.
    """
    if isinstance(given, str) and is_url(given):
        return fetch_url(given, cache).path
    path = Path(given)
    if not path.name.endswith(RECORD):
        return path
    record = read_record(path)
    if record.path.exists():
        return record.path
    again = fetch_url(record.url, cache)
    if again.sha256 != record.sha256:
        raise DataError(
            f"{redacted(record.url)}: is another file than when {path} was written; delete that and rerun"
        )
    return again.path


def _complete(folder: Path, address: str) -> Fetched | None:
    record = folder / RECORD.removeprefix(".")
    if not record.exists():
        return None
    stored = read_record(record)
    path = folder / stored.path.name  # the cache may have been moved
    is_whole = path.is_dir() or (path.is_file() and path.stat().st_size == stored.n_bytes)
    return Fetched(address, path.absolute(), stored.sha256, stored.n_bytes) if is_whole else None


def _fetch(address: str, folder: Path, wanted: str | None) -> Fetched:
    url = urlsplit(address)
    name = PurePosixPath(unquote(url.path.rstrip("/"))).name or url.netloc
    name = re.sub(r"[^\w.+-]", "_", name).lstrip(".")  # the format is recognised by it
    if name in ("", "lock", RECORD.removeprefix(".")):
        name = f"data-{name}"
    target = folder / name
    # flock may be local to a node: others may be fetching
    for left in folder.glob(".incomplete-*"):
        with suppress(FileNotFoundError):  # renamed or removed by now
            newest = max(file.stat().st_mtime for file in (left, *left.rglob("*")))
            if time.time() - newest > _DEAD_S:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=".incomplete-", dir=folder) as temporary:
        copy = Path(temporary, target.name)
        shown = redacted(address)
        protocol = urlsplit(address).scheme.lower()
        try:
            _download(address, copy)
        except UserError:
            raise
        except ImportError as error:
            extra = _EXTRAS.get(protocol)
            remedy = f"pip install 'cellmill[{extra}]'" if extra else one_line(error)
            raise ConfigError(
                f"{shown}: a package for {protocol}:// is missing: {remedy}"
            ) from None
        except FileNotFoundError:
            raise DataError(f"{shown}: no such file") from None
        except Exception as error:  # packages raise errors of their own, some with the URL
            text = re.sub(
                r"\w[\w+.-]*://\S+",
                lambda match: redacted(match[0]) if is_url(match[0]) else "",
                str(error),
            )
            text = " ".join(text.split())[:200]
            raise DataError(f"{shown}: cannot be fetched: {type(error).__name__}: {text}") from None
        origin = origin_of(copy)
        if wanted not in (None, origin["sha256"]):
            raise DataError(f"{shown}: expected sha256 {wanted}, got {origin['sha256']}")
        done = _complete(folder, address)
        if done is not None:  # another node fetched it meanwhile, and its jobs may read it
            return done
        if target.is_dir():
            shutil.rmtree(target)
        copy.rename(target)
    fetched = Fetched(address, target.absolute(), origin["sha256"], origin["bytes"])
    write_json(folder / RECORD.removeprefix("."), fetched.to_json() | {"url": redacted(address)})
    return fetched


def _download(address: str, copy: Path) -> None:
    protocol = urlsplit(address).scheme.lower()
    if protocol in ("http", "https"):  # fsspec's needs aiohttp
        with (
            urllib.request.urlopen(address, timeout=_TIMEOUT_S) as remote,
            open(copy, "wb") as local,
        ):
            n_bytes = remote.length
            pieces = iter(partial(remote.read, 1 << 20), b"")
            if n_bytes:
                pieces = progress(
                    pieces,
                    f"fetch {copy.name}",
                    n_bytes / 1e6,
                    "MB",
                    lambda piece: len(piece) / 1e6,
                )
            local.writelines(pieces)
            if remote.length:  # fewer bytes than announced
                raise OSError(f"the connection ended {remote.length:,} bytes early")
        return
    if protocol not in fsspec.available_protocols():
        raise ConfigError(
            f"{redacted(address)}: unknown protocol {protocol!r}; {did_you_mean(protocol, _USUAL)}"
        )
    system, root = fsspec.core.url_to_fs(address)
    if not system.isdir(root):
        system.get_file(root, str(copy))
        return
    files = system.find(root)
    names = [PurePosixPath(file[len(root) :].strip("/")) for file in files]
    if not files:
        raise DataError(f"{redacted(address)}: no such file, or an empty folder")
    outside = [name for name in names if name.is_absolute() or ".." in name.parts]
    if outside:
        raise DataError(
            f"{redacted(address)}: has a file {str(outside[0])!r}, which is outside its folder"
        )
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
    system.get(files, [str(copy / name) for name in names])
