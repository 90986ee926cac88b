"""Atomic files: killed writers, full disks, file modes, and the errors of bad files."""

import errno
import io
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cellmill.data.saved_work import SavedWork
from cellmill.errors import DataError
from cellmill.files import (
    PROGRESS,
    atomic_path,
    digest,
    named_errors,
    progress,
    read_json,
    remove_incomplete,
    write_json,
    write_text,
)
from tests.distributed.command import wait_for

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


@contextmanager
def writing(final: Path) -> Iterator[None]:
    """A process that is killed while it writes `final`."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(final)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        yield
        writer.send_signal(signal.SIGKILL)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("before", [[], ["out.bin"]])
def test_a_killed_writer_leaves_the_old_file_or_none(tmp_path: Path, before: list[str]) -> None:
    final = tmp_path / "out.bin"
    for name in before:
        (tmp_path / name).write_text("old")
    with writing(final):
        pass
    left, *others = names(tmp_path)
    assert re.fullmatch(r"\.out\..*\.incomplete\.bin", left)
    assert others == before
    assert not before or final.read_text() == "old"
    umask = os.umask(0o027)
    write_text(final, "new")
    os.umask(umask)
    assert names(tmp_path) == ["out.bin"]
    assert stat.S_IMODE(final.stat().st_mode) == 0o640


def test_the_file_of_a_writer_that_lives_stays(tmp_path: Path) -> None:
    final = tmp_path / "out.bin"
    with writing(final):
        write_text(final, "new")
        remove_incomplete(final)
        left, _ = names(tmp_path)
    # of another host it is not known whether its writer lives
    other = tmp_path / re.sub(r"\.[0-9a-f]{6}-", ".ffffff-", left)
    (tmp_path / left).rename(other)
    write_text(final, "new")
    assert other.exists()
    os.utime(other, (0, 0))
    write_text(final, "new")
    assert not other.exists()


def test_an_error_without_a_name_gets_that_file_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "out.npy"
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
    command = [
        sys.executable,
        "-c",
        LIMITED,
        "simulate",
        "--out",
        str(out),
        "--cells",
        "500",
        "--genes",
        "300",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("cellmill simulate: ")
    assert "File too large" in done.stderr
    assert names(tmp_path) == []


def test_a_file_appears_only_when_its_block_ends(tmp_path: Path) -> None:
    final = tmp_path / "new" / "out.txt"
    with atomic_path(final) as path:
        assert (path.suffix, path.parent) == (".txt", final.parent)
        path.write_text("old")
        assert not final.exists()
    assert (final.read_text(), names(final.parent)) == ("old", ["out.txt"])


def test_an_error_in_the_block_keeps_the_old_file(tmp_path: Path) -> None:
    final = tmp_path / "out.txt"
    final.write_text("old")
    with pytest.raises(RuntimeError), atomic_path(final) as path:
        raise RuntimeError(path.write_text("half"))
    assert (final.read_text(), names(final.parent)) == ("old", ["out.txt"])
    with pytest.raises(IsADirectoryError) as error, atomic_path(tmp_path):
        raise AssertionError("the block must not run")
    assert error.value.filename == str(tmp_path)


def test_bytes_reach_the_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power failure at any moment leaves: each fsync with what it makes durable."""
    final = tmp_path / "a.json"
    durable = list[tuple[str, bool]]()
    fsync = os.fsync

    def recorded(handle: int) -> None:
        folder = Path(os.readlink(f"/proc/self/fd/{handle}")) == tmp_path
        durable.append(("folder" if folder else os.pread(handle, 100, 0).decode(), final.exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    write_text(final, "all of it")
    assert durable == [("all of it", False), ("folder", True)]


def test_json_reads_back_equal(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None], "é": {"b": True}}
    write_json(tmp_path / "value.json", value)
    assert read_json(tmp_path / "value.json") == value
    assert digest(value) == digest(dict(reversed(value.items())))


def test_no_error_has_the_name_of_a_temporary_file() -> None:
    final = Path("/sys/cellmill.json")  # where not even root makes files
    with pytest.raises(OSError, match=r"cellmill\.json") as caught:
        write_json(final, {})
    assert caught.value.filename == str(final)
    with pytest.raises(OSError, match=r"cellmill\.json") as caught, SavedWork(final, {}) as saved:
        saved.stream("rows", "state").write(np.ones(3))
    assert caught.value.filename == str(final)


def test_json_with_nan_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, {"loss": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": float("nan")})
    assert read_json(path) == {"loss": 1.0}


def test_truncated_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    path.write_text('{"a": [1, 2.5')
    with pytest.raises(DataError, match=r"value\.json: not valid JSON \("):
        read_json(path)


def shown(out: io.StringIO, seconds: list[float], rows: int = 1000, **options: Any) -> list[str]:
    """Lines of `progress` over blocks of `rows` cells, each of which takes its seconds."""
    now = [0.0]
    blocks = [np.empty((rows, 2)) for _ in seconds]
    steps = progress(
        blocks, "preprocess kang", rows * len(blocks), clock=lambda: now[0], out=out, **options
    )
    for took, _ in zip(seconds, steps):
        now[0] += took
    return out.getvalue().splitlines()


def test_a_log_gets_progress_only_from_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shown(io.StringIO(), [0.5] * 9) == []
    assert shown(io.StringIO(), [2.5] * 20) == [
        "preprocess kang: 2,000 of 20,000 cells (10%), 400 cells/s, 45 s left",
        "preprocess kang: 14,000 of 20,000 cells (70%), 400 cells/s, 15 s left",
    ]
    slow = shown(io.StringIO(), [3000.0] * 3, rows=1, unit="tasks", now=lambda: "annotate")
    assert slow == [
        "preprocess kang: 1 of 3 tasks (33%), 1.7 h left, now annotate",
        "preprocess kang: 2 of 3 tasks (67%), 50 min left, now annotate",
    ]
    [ending, _] = shown(io.StringIO(), [3000.0] * 3, rows=1, unit="tasks", now=str)
    assert ending == "preprocess kang: 1 of 3 tasks (33%), 1.7 h left"
    assert all(PROGRESS.fullmatch(line) for line in [*slow, *shown(io.StringIO(), [6.0, 6.0])])
    monkeypatch.setenv("RANK", "1")
    assert shown(io.StringIO(), [2.5] * 20) == []


def test_a_terminal_gets_a_bar_that_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    assert not shown(out, [1.0] * 4)
    shown(out, [5.0] * 3)
    first, second, cleared = out.getvalue().split("\r")[1:]
    assert (
        first == "preprocess kang:  33%|█████▋           | 1.00k/3.00k [00:05<00:10, 200 cells/s]"
    )
    assert (
        second == "preprocess kang:  67%|███████████▎     | 2.00k/3.00k [00:10<00:05, 200 cells/s]"
    )
    assert cleared == "\x1b[K"


def test_a_long_item_is_named_while_it_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellmill.files.QUIET_S", 0.01)
    out = io.StringIO()
    for _ in progress([0], "evaluate kang", 1, "tasks", now=lambda: "umap", out=out):
        wait_for(out.getvalue)
    assert out.getvalue() == "evaluate kang: 0 of 1 tasks (0%), now umap\n"
