"""Atomic files: killed writers, full disks, file modes, and the errors of bad files."""

import errno
import hashlib
import io
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cellmill.errors import DataError
from cellmill.files import (
    PROGRESS,
    atomic_path,
    digest,
    named_errors,
    progress,
    read_json,
    remove_incomplete,
    sha256_file,
    write_json,
    write_text,
)

WRITER = """
import sys, time
from pathlib import Path
from cellmill.files import atomic_path
with atomic_path(Path(sys.argv[1])) as path:
    with open(path, "wb") as file:
        file.write(b"x" * 100_000)
    print("written", flush=True)
    time.sleep(60)
"""

LIMITED = """
import resource, signal, sys
from cellmill.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.exit(main(sys.argv[1:]))
"""


def start_writer(final: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(final)], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("before", [None, "old"])
def test_a_killed_writer_leaves_the_old_file_or_none(tmp_path: Path, before: str | None) -> None:
    final = tmp_path / "out.bin"
    if before is not None:
        final.write_text(before)
    with start_writer(final) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        writer.send_signal(signal.SIGKILL)
    assert (final.read_text() if final.exists() else None) == before
    left = [path.name for path in tmp_path.iterdir() if path != final]
    assert len(left) == 1
    assert left[0].startswith(".out.")
    assert left[0].endswith(".incomplete.bin")
    write_text(final, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["out.bin"]


def test_the_file_of_a_writer_that_lives_stays(tmp_path: Path) -> None:
    final = tmp_path / "out.bin"
    with start_writer(final) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        write_text(final, "new")
        remove_incomplete(final)
        left = [path.name for path in tmp_path.iterdir() if path != final]
        assert len(left) == 1
        writer.send_signal(signal.SIGKILL)
    # of another host it is not known whether its writer lives
    other = tmp_path / re.sub(r"\.[0-9a-f]{6}-", ".ffffff-", left[0])
    (tmp_path / left[0]).rename(other)
    write_text(final, "new")
    assert other.exists()
    os.utime(other, (0, 0))
    write_text(final, "new")
    assert not other.exists()


def test_an_error_without_a_name_gets_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "out.npy"
    with pytest.raises(OSError, match="No space left") as error, atomic_path(final):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert error.value.filename == str(final)
    with pytest.raises(ConnectionResetError) as other, atomic_path(final):
        raise OSError(errno.ECONNRESET, "of a source that is read")
    assert other.value.filename is None
    with pytest.raises(OSError, match="700 requested") as numpy_error, atomic_path(final):
        raise OSError("700 requested and 248 written")
    assert numpy_error.value.errno is None  # there is space: something else is wrong
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(OSError, match="No space left") as full, named_errors(final):
        raise OSError("700 requested and 248 written")
    assert full.value.filename == str(final)


def test_a_full_disk_ends_a_stage_in_one_line_without_output(tmp_path: Path) -> None:
    out = tmp_path / "cells.h5ad"
    command = [sys.executable, "-c", LIMITED, "simulate", "--out", str(out), "--cells", "500", "--genes", "300"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("cellmill simulate: ")
    assert "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_block_keeps_the_old_file_and_no_temporary_file(tmp_path: Path) -> None:
    final = tmp_path / "out.txt"
    write_text(final, "old")

    def half() -> None:
        with atomic_path(final) as path:
            path.write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        half()
    assert final.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as error, atomic_path(tmp_path):
        raise AssertionError("the block must not run")
    assert error.value.filename == str(tmp_path)


def test_the_file_appears_only_when_the_block_ends_and_its_folder_is_made(tmp_path: Path) -> None:
    final = tmp_path / "new" / "folder" / "out.h5ad"
    with atomic_path(final) as path:
        assert path.suffix == ".h5ad"
        assert path.parent == final.parent
        path.write_text("whole")
        assert not final.exists()
    assert final.read_text() == "whole"


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_the_file_mode_follows_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "ours", "")
        (tmp_path / "plain").touch()
    finally:
        os.umask(before)
    ours, plain = (stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "plain"))
    assert ours == plain == 0o666 & ~umask


def test_bytes_are_on_disk_before_the_name_and_the_name_before_the_next_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power failure at any moment leaves: each fsync with what it makes durable."""
    final, durable, fsync = tmp_path / "a.json", list[tuple[str, bool]](), os.fsync

    def recorded(handle: int) -> None:
        folder = Path(os.readlink(f"/proc/self/fd/{handle}")) == tmp_path
        durable.append(("folder" if folder else os.pread(handle, 100, 0).decode(), final.exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    write_text(final, "all of it")
    assert durable == [("all of it", False), ("folder", True)]


def test_json_round_trips_and_nan_is_refused(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None], "é": {"b": True}}
    write_json(tmp_path / "value.json", value)
    assert read_json(tmp_path / "value.json") == value
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "value.json", {"loss": float("nan")})
    assert read_json(tmp_path / "value.json") == value


def test_missing_or_truncated_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(DataError) as missing:
        read_json(path)
    assert str(missing.value) == f"{path}: no such file"
    path.write_text(json.dumps({"steps": 10})[:-3])
    with pytest.raises(DataError, match=r"plan\.json: not valid JSON \("):
        read_json(path)


def test_digests_depend_on_bytes_and_not_on_the_order_of_keys(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"cells" * 100_000)
    assert sha256_file(tmp_path / "file") == hashlib.sha256(b"cells" * 100_000).hexdigest()
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": [1, 2], "a": 1})
    assert digest({"b": [1, 2]}) != digest({"b": [2, 1]})


class Clock:
    """Seconds since 0, which the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(out: io.StringIO, seconds: list[float], rows: int = 1000, **options: Any) -> list[str]:
    """Lines of `progress` over blocks of `rows` cells, each of which takes its seconds."""
    clock, blocks = Clock(), [np.empty((rows, 2)) for _ in seconds]
    for took, _ in zip(
        seconds, progress(blocks, "preprocess kang", rows * len(blocks), clock=clock, out=out, **options)
    ):
        clock.now += took
    return out.getvalue().splitlines()


def test_a_log_gets_a_line_after_5_s_and_then_every_30_s() -> None:
    assert shown(io.StringIO(), [2.5] * 20) == [
        "preprocess kang: 2,000 of 20,000 cells (10%), 400 cells/s, 45 s left",
        "preprocess kang: 14,000 of 20,000 cells (70%), 400 cells/s, 15 s left",
    ]
    slow = shown(io.StringIO(), [3000.0] * 3, rows=1, unit="tasks", now=lambda block: "annotate")
    assert slow == [
        "preprocess kang: 1 of 3 tasks (33%), 1.7 h left, now annotate",
        "preprocess kang: 2 of 3 tasks (67%), 50 min left, now annotate",
    ]
    assert all(PROGRESS.fullmatch(line) for line in [*slow, *shown(io.StringIO(), [6.0, 6.0])])


def test_a_stage_under_5_s_and_other_ranks_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(io.StringIO(), [0.5] * 9) == []
    monkeypatch.setenv("RANK", "1")
    assert shown(io.StringIO(), [2.5] * 20) == []


def test_a_terminal_gets_a_bar_that_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    assert not shown(out, [1.0] * 4)
    shown(out, [5.0] * 3)
    first, second, cleared = out.getvalue().split("\r")[1:]
    assert first == "preprocess kang:  33%|█████▋           | 1.00k/3.00k [00:05<00:10, 200 cells/s]"
    assert second == "preprocess kang:  67%|███████████▎     | 2.00k/3.00k [00:10<00:05, 200 cells/s]"
    assert cleared == "\x1b[K"


def test_a_long_item_is_named_while_it_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellmill.files.QUIET_S", 0.01)
    out, waits = io.StringIO(), Event()
    for _ in progress(["umap"], "evaluate kang", 1, "tasks", now=str, out=out):
        for _ in range(1000):
            if out.getvalue():
                break
            waits.wait(0.01)
    assert out.getvalue() == "evaluate kang: 0 of 1 tasks (0%), now umap\n"
