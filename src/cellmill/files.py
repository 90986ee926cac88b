"""Atomic files: write to a temporary file in the same folder, fsync, rename.

Every output of the workflow is written through here, so a killed process, a full disk or a lost
node leaves the old file or none, never a partial one. A folder's manifest is written last: if it
exists, the rest is complete. The temporary file of a killed process is removed by the next one that
writes the same file.

`progress` shows how far the loop of a stage is; in a log its last line also says so to `cellmill
status`.
"""

import errno
import glob
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from typing import Any, TextIO, TypeVar

from cellmill.errors import ConfigError, DataError

T = TypeVar("T")

SPECIAL_KINDS = {
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}
_TEMPORARY = r"\.+{stem}(\.(?P<host>[0-9a-f]{{6}})-(?P<pid>\d+)-[0-9a-f]{{8}}\.incomplete)+"
_SURELY_LEFT_S = 86400  # age of a temporary file of another host that nobody writes to any more
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
QUIET_S = 5.0
EVERY_S = 30.0
REDRAW_S = 0.2
PROGRESS = re.compile(
    r"\S.*: [\d,]+ of [\d,]+ \w+ \(\d+%\)(, [\d,]+ \w+/s)?(, .+ left)?(, now .+)?"
)
"""A line of `progress`."""


def _processes() -> str:
    """Six hexadecimal digits that identify the host or container to which a process id belongs."""
    names = [socket.gethostname()]
    for read in (
        lambda: os.readlink("/proc/self/ns/pid"),
        Path("/proc/sys/kernel/random/boot_id").read_text,
    ):
        with suppress(OSError):
            names.append(read())
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:6]


HOST = _processes()


@contextmanager
def atomic_path(final: Path, copy_of: Path | None = None) -> Iterator[Path]:
    """A temporary path, fsynced and renamed to `final` if the block ends without an error.

    It has the suffix of `final`, by which libraries choose a format. A changed copy of the file
    `copy_of` keeps the permissions of a `final` that exists, and else is for nobody who may not read
    `copy_of`. Raise DataError for a device, FIFO or socket, which the rename would replace, and
    OSError with the name of `final` if the disk or the quota is full.
    """
    final = Path(final)
    if final.is_dir():  # the rename would name the temporary path
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(final))
    refuse_special(final, "the name of a file")
    final.parent.mkdir(parents=True, exist_ok=True)
    remove_incomplete(final, older_than_s=_SURELY_LEFT_S)
    writer = f"{HOST}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary = final.with_name(f".{final.stem}.{writer}.incomplete{final.suffix}")
    with called(final):
        temporary.touch(exist_ok=False)
    mode = stat.S_IMODE(temporary.stat().st_mode)
    try:
        if copy_of is not None:
            mode &= copy_of.stat().st_mode | stat.S_IRWXU
            if final.exists():
                mode = stat.S_IMODE(final.stat().st_mode)
            temporary.chmod(mode | stat.S_IRUSR | stat.S_IWUSR)
        with named_errors(final, FULL):
            yield temporary
            # safetensors replaces the file by one of mode 0600, which the group cannot read
            temporary.chmod(mode)
            fsync(temporary)  # where a network file system may first say that it is full
            temporary.replace(final)
            fsync(final.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def called(path: Path) -> Iterator[None]:
    """Give an OSError the name `path`, instead of that of a temporary file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def named_errors(path: Path, codes: Collection[int] | None = None) -> Iterator[None]:
    """Add `path` to an OSError that names no file, if given only to those with one of `codes`."""
    try:
        yield
    except OSError as error:
        code = error.errno
        # numpy's error for a full disk has none
        if (
            code is None
            and shutil.disk_usage(path if path.exists() else path.parent).free < 1 << 20
        ):
            code = errno.ENOSPC
        if code is None or error.filename is not None or (codes is not None and code not in codes):
            raise
        raise OSError(code, os.strerror(code), str(path)) from None


def remove_incomplete(final: Path, older_than_s: float = 0) -> None:
    """Remove temporary files of `final` whose writer was killed.

    On this host it is no longer a process. Processes of other hosts are not known: their files go
    if nobody has written to them for `older_than_s`.
    """
    temporary = re.compile(_TEMPORARY.format(stem=re.escape(final.stem)) + re.escape(final.suffix))
    for path in final.parent.glob(f".*{glob.escape(final.stem)}.*.incomplete*"):
        match = temporary.fullmatch(path.name)
        if match is None:
            continue
        # another process removed it first, or it or its writer is another user's
        with suppress(OSError):
            if match["host"] == HOST:
                try:
                    os.kill(int(match["pid"]), 0)
                except ProcessLookupError:
                    path.unlink()
            elif time.time() - path.stat().st_mtime >= older_than_s:
                path.unlink()


def user_cache() -> Path:
    """Folder of this user's files that can be made again; it may not exist.

    Raise DataError if the user has no home folder, as in containers with any user id.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cellmill"
    except RuntimeError:
        raise DataError("this user has no home folder; set HOME or XDG_CACHE_HOME") from None


def private_folder() -> Path | None:
    """This user's temporary folder on this host; None if another user has made it, or it cannot be made."""
    folder = Path(tempfile.gettempdir(), f"cellmill-{os.getuid()}")
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        made = folder.lstat()
        if made.st_uid == os.getuid() and made.st_mode == stat.S_IFDIR | 0o700:
            return folder
    return None


def write_text(final: Path, text: str) -> None:
    with atomic_path(final) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(final: Path, value: Any) -> None:
    """Write `value` as indented JSON to `final`, atomically. NaN raises ValueError: it is not JSON."""
    write_text(final, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read the JSON in `path`. Raise DataError naming the file if it is missing or not JSON."""
    require_file(path)
    return parse_json(Path(path).read_bytes(), path)


def read_own_json(path: Path) -> Any:
    """Read JSON that `write_json` wrote. Raise DataError also for NaN and Infinity, which it refuses."""
    value = read_json(path)
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise DataError(f"{path}: damaged: a number is NaN or infinite; make it again") from None
    return value


def parse_json(text: str | bytes, source: Path | str) -> Any:
    """The value of a text that `source` holds. Raise DataError naming it if the text is not JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{source}: not valid JSON ({error})") from None
    except RecursionError:
        raise DataError(f"{source}: not valid JSON (nested too deeply)") from None


def require_file(path: Path) -> None:
    """Raise DataError unless `path` is a regular file, or a link to one, that this user may read."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise DataError(f"{path}: {'no such file' if missing else error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise DataError(f"{path}: expected a file, got a {special_kind(path) or 'folder'}")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: {os.strerror(errno.EACCES)}")


def refuse_special(path: Path, expected: str = "a file") -> None:
    """Raise DataError for a FIFO, socket or device: opening a FIFO would wait without end."""
    kind = special_kind(path)
    if kind is not None:
        raise DataError(f"{path}: expected {expected}, got a {kind}")


def name_datasets(paths: Sequence[Path], option: str) -> list[str]:
    """Return the dataset's name of each file. Raises ConfigError if two files of `option` share one."""
    names = [path.stem for path in paths]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"{option}: two files are called {twice[0]!r}; a dataset is named by its file, rename one"
        )
    return names


def refuse_overwriting(
    out: Path,
    others: Iterable[tuple[str, Path]],
    flag: str = "--out",
    remedy: str = "name another file",
) -> None:
    """Raise ConfigError if `out` is the file of another argument, which would be lost.

    `others` are flags and paths.
    """
    for other, path in others:
        if path.resolve() == out.resolve():
            raise ConfigError(f"{flag} {out} is {other}, which would be lost; {remedy}")


def check_writable(out: Path, flag: str = "--out") -> None:
    """Raise ConfigError, before the work for it, if `out` could not be written. Makes its folder."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        problem = os.strerror(errno.EISDIR) if out.is_dir() else None
        if not os.access(out.parent, os.W_OK | os.X_OK):
            problem = os.strerror(errno.EACCES)
    except OSError as error:
        problem = error.strerror
    if problem:
        raise ConfigError(f"{flag} {out}: {problem}; name another file")


def special_kind(path: Path) -> str | None:
    """FIFO, socket or device; None for anything else and for a path that does not exist."""
    with suppress(OSError):
        return SPECIAL_KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    return None


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes.

    Raise DataError if it is missing or not a regular file.
    """
    require_file(path)
    with named_errors(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """Hexadecimal SHA-256 of a JSON-able value, independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def fsync(path: Path) -> None:
    """Make the bytes of a file, or a rename inside a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def span(seconds: float) -> str:
    """A duration in its largest unit: 40 s, 12 min, 3.5 h, 2.1 days."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def progress(
    items: Iterable[T],
    what: str,
    total: float,
    unit: str = "cells",
    size: Callable[[T], float] = lambda item: getattr(item, "shape", (1,))[0],
    now: Callable[[], str] | None = None,
    clock: Callable[[], float] = time.monotonic,
    out: TextIO | None = None,
) -> Iterator[T]:
    """Yield `items`, and show on `out` (stderr) how much of `total` is done, after the first 5 s.

    On a terminal it is a bar, elsewhere one line every 30 s. An item counts `size` units (the rows
    of a block, else 1) when the next one is wanted. `now` names what is at work ("" for nothing), and is
    shown while one takes long, too. Of a training's processes only rank 0 shows anything.
    """
    out = out or sys.stderr
    done = 0.0
    began = clock()
    ended = Event()
    is_terminal = out.isatty()
    due = began + (QUIET_S if os.environ.get("RANK", "0") == "0" else math.inf)
    has_drawn = False

    def show_if_due() -> None:
        nonlocal due, has_drawn
        time_now = clock()
        if time_now < due:
            return
        due = time_now + (REDRAW_S if is_terminal else EVERY_S)
        elapsed = time_now - began
        current = "" if now is None else now()
        named = f", now {current}" if current else ""
        if is_terminal:  # imported late: it takes 0.1 s
            format_meter = import_module("tqdm").tqdm.format_meter
            has_drawn = True
            bar = format_meter(
                done,
                total,
                elapsed,
                ncols=shutil.get_terminal_size().columns - 1,
                prefix=what + named,
                unit=f" {unit}",
                unit_scale=True,
            )
            out.write(f"\r{bar}")
        else:
            rate = done / elapsed
            line = f"{what}: {done:,.0f} of {total:,.0f} {unit} ({done / max(total, done, 1):.0%})"
            if rate >= 1:
                line += f", {rate:,.0f} {unit}/s"
            if done:
                line += f", {span(max(0.0, total - done) / rate)} left"
            out.write(f"{line}{named}\n")
        out.flush()

    def beat() -> None:
        while not ended.wait(QUIET_S):
            show_if_due()

    if now is not None:
        Thread(target=beat, daemon=True).start()
    try:
        for item in items:
            show_if_due()
            yield item
            done += size(item)
    finally:
        ended.set()
        if has_drawn:
            out.write("\r\x1b[K")  # clears the bar
            out.flush()
