"""Work of a stage on one output, saved next to it, so that a later process resumes it after a kill.

A state is a few arrays that say how far a pass has come. It is written under another name and renamed,
so that it is complete or absent. Bytes too many to write again with every state are appended to files,
the streams. A state lists these files, with the number of bytes that were on disk before it was
written.

    .NAME.partial.STATE         safetensors: the arrays; metadata `about`, JSON: digests of the
                                `facts` on which the result depends, the arrays' CRC-32, and the
                                files of each stream
    .NAME.partial.STREAM-HEX    appended bytes; no two processes append to one file

A state that is damaged or whose facts differ is removed, and one line says so. Two processes that
write one output do not disturb each other: each reads only what was there when it began or what it
wrote itself, and holds these files open. The last state that was renamed is resumed.
"""

import glob
import json
import os
import secrets
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from cellmill.errors import UserError
from cellmill.files import atomic_path, called, digest, fsync, named_errors, remove_incomplete

SAVE_EVERY = 1 << 18  # cells
SAVE_EVERY_S = 60.0
_ABOUT = "about"


class SavedBytes:
    """A stream: bytes that a stage appends and reads again, in files next to its output `out`.

    `earlier` has the open files of killed processes, each with the number of its bytes that count.
    """

    def __init__(
        self, out: Path, path: Path | None, earlier: list[tuple[BinaryIO, int]] | None = None
    ) -> None:
        self._out = out
        self._path = path  # this process's file; None for a file without a name
        self._earlier = list(earlier or ())
        self._own: BinaryIO | None = None  # this process's file, once it has been written
        self._n_own = 0  # its bytes

    @property
    def size(self) -> int:
        """Number of bytes."""
        return sum(n for _, n in self._earlier) + self._n_own

    def write(self, array: np.ndarray) -> None:
        """Append the bytes of an array. OSError names the output on a full disk."""
        with named_errors(self._out):
            if self._own is None:
                self._own = self._create()
            self._own.write(_bytes_of(array))
        self._n_own += array.nbytes

    def read_into(self, array: np.ndarray, position: int) -> None:
        """Fill a contiguous array with the bytes from `position` on, of which there must be enough."""
        rest = _bytes_of(array)
        with named_errors(self._out):
            if self._own is not None:
                self._own.flush()
            for file, n in self._list_files():
                while len(rest) and position < n:
                    n_wanted = min(len(rest), n - position)
                    n_read = os.preadv(file.fileno(), [rest[:n_wanted]], position)
                    if not n_read:
                        raise OSError(f"{file.name}: it was shortened while it was read")
                    rest = rest[n_read:]
                    position += n_read
                position = max(0, position - n)
        assert not len(rest), "expected more bytes"

    def sync(self) -> list[tuple[str, int]]:
        """Make all bytes durable; return the name of each file and the number of its bytes that count."""
        if self._own is not None:
            with named_errors(self._out):
                self._own.flush()
                os.fsync(self._own.fileno())
                fsync(self._out.parent)
        return [(Path(file.name).name, n) for file, n in self._list_files()]

    def close(self) -> None:
        """Close the files."""
        for file, _ in self._list_files():
            file.close()

    def _list_files(self) -> list[tuple[BinaryIO, int]]:
        """List the files in order, each with the number of its bytes that count."""
        own = [] if self._own is None else [(self._own, self._n_own)]
        return [*self._earlier, *own]

    def _create(self) -> BinaryIO:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        with called(self._out):
            if self._path is None:
                return tempfile.TemporaryFile(prefix="cellmill-", dir=self._out.parent)
            return open(self._path, "x+b")


class SavedWork(AbstractContextManager["SavedWork"]):
    """Work on the output `out`, whose result depends on `facts` (JSON values).

    Without facts nothing is saved. A `with` block that ends without an error removes what was saved.
    One that ends with an error of the input or options removes it too, because a later process would
    meet the error again.
    """

    def __init__(
        self,
        out: Path,
        facts: Mapping[str, Any] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._facts = None if facts is None else _digests(facts)
        self._clock = clock
        self._saved_at = clock()
        self._n_unsaved = 0
        self._has_saved = False
        self._streams: list[SavedBytes] = []

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for stream in self._streams:
            stream.close()
        is_kept = self._has_saved and kind is not None and not issubclass(kind, UserError)
        if self._facts is not None and not is_kept:
            remove_work(self._out)

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """Add facts that are known only after the start. Call it before states are looked for."""
        if self._facts is not None:
            self._facts |= _digests(facts)

    def restore(self, name: str) -> dict[str, np.ndarray] | None:
        """Read the arrays of state `name`; None if there is none to resume."""
        about = self._abouts.get(name)
        if about is None:
            return None
        try:
            with safe_open(_path(self._out, name), "np") as file:
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except Exception:  # damaged bytes raise almost anything
            arrays = {}
        if _checksum(arrays) != about["checksum"]:
            del self._abouts[name]
            self._drop({name: "damaged"})
            return None
        self._has_saved = True
        return arrays

    def stream(self, name: str, state: str) -> SavedBytes:
        """Open stream `name`, with the bytes that state `state` counts, or none without that state."""
        earlier: list[tuple[BinaryIO, int]] = []
        for file, n in self._abouts.get(state, {"streams": {}})["streams"].get(name, ()):
            path = self._out.with_name(file)
            earlier.append((open(path, "rb"), n))  # noqa: SIM115 - closed with the stream
        own = None
        if self._facts is not None:
            own = _path(self._out, f"{name}-{secrets.token_hex(4)}")
        stream = SavedBytes(self._out, own, earlier)
        self._streams.append(stream)
        return stream

    def is_due(self, n_cells: int) -> bool:
        """Count `n_cells` more cells. Return True if it is time to save."""
        self._n_unsaved += n_cells
        is_late = self._clock() - self._saved_at >= SAVE_EVERY_S
        return self._facts is not None and (is_late or self._n_unsaved >= SAVE_EVERY)

    @property
    def has_saved(self) -> bool:
        """True once there is a state to resume."""
        return self._has_saved

    def save(
        self,
        name: str,
        arrays: Mapping[str, np.ndarray],
        streams: Mapping[str, SavedBytes] | None = None,
    ) -> None:
        """Save state `name`, with all bytes of `streams` so far."""
        if self._facts is None:
            return
        stored = {key: np.asarray(array, order="C") for key, array in arrays.items()}
        about = {
            "facts": self._facts,
            "checksum": _checksum(stored),
            "streams": {key: stream.sync() for key, stream in (streams or {}).items()},
        }
        with atomic_path(_path(self._out, name)) as temporary:
            save_file(stored, temporary, {_ABOUT: json.dumps(about)})
        self._has_saved = True
        self._n_unsaved = 0
        self._saved_at = self._clock()

    @cached_property
    def _abouts(self) -> dict[str, Any]:
        """Metadata of the states that can be resumed, by name.

        Other states are removed, and so are the files that no resumable state lists.
        """
        abouts: dict[str, Any] = {}
        if self._facts is None:
            return abouts
        listed = set[str]()
        faults: dict[str, str] = {}
        streams = []
        for path in _list_work(self._out):
            name = path.name.removeprefix(_path(self._out, "").name)
            if "-" in name:
                streams.append(path)
                continue
            about = _read_about(path)
            fault = self._find_fault(about)
            if fault is None:
                abouts[name] = about
                listed.update(file for files in about["streams"].values() for file, _ in files)
            else:
                faults[name] = fault
        self._drop(faults)
        for path in streams:
            if path.name not in listed:
                path.unlink(missing_ok=True)
        return abouts

    def _find_fault(self, about: Any) -> str | None:
        """Say why a state cannot be resumed; None if it can."""
        facts = self._facts or {}
        try:
            stored = about["facts"]
            changed = [key for key in {**facts, **stored} if facts.get(key) != stored.get(key)]
            if changed:
                return f"changed: {', '.join(changed)}"
            for files in about["streams"].values():
                for file, n in files:
                    if self._out.with_name(Path(file).name).stat().st_size < n:
                        return "damaged"
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return "damaged"
        return None

    def _drop(self, faults: Mapping[str, str]) -> None:
        """Remove states, and say why."""
        for name in faults:
            _path(self._out, name).unlink(missing_ok=True)
        for fault in sorted({*faults.values()}):
            print(
                f"{self._out}: what a killed process saved is not used ({fault}); the work begins again",
                file=sys.stderr,
                flush=True,
            )


class SavedRows:
    """Arrays with one row for each cell, which fill up in the order of the cells.

    Each array is a stream of state `state`. If there is such a state, it must be restored before.
    """

    def __init__(self, saved: SavedWork, state: str, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays
        self._streams = {name: saved.stream(name, state) for name in arrays}
        self._n_saved = 0

    def restore(self, n: int) -> int:
        """Fill the first `n` rows; return `n`."""
        for name, array in self._arrays.items():
            self._streams[name].read_into(array[:n], 0)
        self._n_saved = n
        return n

    def append(self, n: int) -> dict[str, SavedBytes]:
        """Append the rows before row `n` that are not saved yet, and return the streams."""
        for name, array in self._arrays.items():
            self._streams[name].write(array[self._n_saved : n])
        self._n_saved = n
        return self._streams


def remove_work(out: Path) -> None:
    """Remove all that was saved of the work on `out`."""
    for path in _list_work(out):
        path.unlink(missing_ok=True)
        remove_incomplete(path)


def _path(out: Path, name: str) -> Path:
    return out.with_name(f".{out.name}.partial.{name}")


def _list_work(out: Path) -> list[Path]:
    return sorted(out.parent.glob(glob.escape(_path(out, "").name) + "*"))


def _read_about(path: Path) -> Any:
    """Read the metadata of a state; None if it is damaged."""
    # damaged bytes raise almost anything
    with suppress(Exception), safe_open(path, "np") as file:
        return json.loads(file.metadata()[_ABOUT])
    return None


def _digests(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest(value) for name, value in facts.items()}


def _checksum(arrays: Mapping[str, np.ndarray]) -> int:
    """Compute the CRC-32 of the names and bytes of arrays."""
    value = 0
    for name in sorted(arrays):
        array = arrays[name]
        value = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), value)
        value = zlib.crc32(_bytes_of(array), value)
    return value


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
