"""Copies of shards on a node's own disk: the same batches whatever happens to them, and nothing
left behind.
"""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import small_corpus
from small_corpus import write_corpus

from cellmill.config.run import Stream
from cellmill.data.shards.index import CellColumns
from cellmill.data.shards.local_copies import LOCK, PREFIX, CopyTask, LocalCopies, remove_abandoned
from cellmill.data.shards.manifest import Manifest
from cellmill.data.stream.cell_stream import CellStream
from cellmill.data.stream.order import OrderOptions, OrderRule, make_epoch_order

STEPS = 30  # of 17 an epoch


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    disk = shutil.disk_usage(tmp_path)
    if disk.free < 0.06 * disk.total:
        pytest.skip("copying leaves 5 % of a disk free, and this one has less than 6 %")
    return write_corpus(tmp_path, 533)  # six shards


def stream_of(manifest: Manifest, folder: Path | None, rank: int = 0, world: int = 1) -> CellStream:
    copies = None if folder is None else LocalCopies(folder)
    return small_corpus.stream_of(manifest, rank, world, {"lanes": 4}, copies=copies)


def digests(stream: CellStream, steps: int = STEPS) -> list[bytes]:
    digests = []
    try:
        for step in islice(stream, steps):
            arrays = [batch.token_ids.tobytes() + batch.values.tobytes() for batch in step]
            digests.append(b"".join(arrays))
    finally:
        stream.close()
    return digests


def copier(
    manifest: Manifest, folder: Path, limit: float | None = None, largest: int | None = None
) -> Any:
    """The process that copies, which may write files of `largest` bytes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cellmill.data.shards.local_copies"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: (
            largest and resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        ),
    )
    shards = {
        str(manifest.shard_path(shard)): shard.sha256 for shard in manifest.splits["train"].shards
    }
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(CopyTask(str(folder), shards, limit))).encode() + b"\n")
    process.stdin.flush()
    return process


def line_of(stream: Any) -> str:
    return stream.readline().decode().strip()


def test_reads_move_to_the_copies_once_complete(manifest: Manifest, tmp_path: Path) -> None:
    expected = digests(stream_of(manifest, None))
    folder = tmp_path / "disk" / f"{PREFIX}1"
    stream = stream_of(manifest, folder)
    batches = iter(stream)
    for _ in range(3):  # from the shared folder
        next(batches)
    process = copier(manifest, folder)
    assert "copied 6 of 6 shards" in line_of(process.stdout)
    # SLURM's, to all processes of a job: the training still has to save
    process.send_signal(signal.SIGTERM)
    for shard in manifest.path.parent.glob("train-*.h5ad"):
        shard.write_bytes(b"gone")
    assert digests(stream) == expected[3:] + digests(stream_of(manifest, folder), STEPS + 3)[STEPS:]
    assert folder.stat().st_mode & 0o777 == 0o700
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert list(folder.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("failure", "n_copies", "line"),
    [
        (
            "full disk",
            0,
            ".h5ad: File too large; shards without a copy are read from the shared folder",
        ),
        (
            "folder is a file",
            0,
            "File exists; shards without a copy are read from the shared folder",
        ),
        ("damaged copy", 2, "expected sha256 000000000000 as in the manifest, got "),
        ("limit", 2, "copied 2 of 6 shards"),
    ],
)
def test_a_failure_leaves_the_batches_unchanged(
    manifest: Manifest, tmp_path: Path, failure: str, n_copies: int, line: str
) -> None:
    expected = digests(stream_of(manifest, None))
    folder = tmp_path / "disk" / f"{PREFIX}1"
    shards = manifest.splits["train"].shards
    size = manifest.shard_path(shards[0]).stat().st_size
    stream = stream_of(manifest, folder)
    if failure == "folder is a file":
        folder.parent.write_text("")
    if failure == "damaged copy":  # the digest is of other bytes
        object.__setattr__(shards[2], "sha256", "0" * 64)
    limits = {"full disk": {"largest": size - 1}, "limit": {"limit": 2.5 * size}}
    process = copier(manifest, folder, **limits.get(failure, {}))
    found = line_of(process.stdout if failure == "limit" else process.stderr)
    assert line in found
    assert found.startswith("warning: ") == (failure != "limit")
    assert len(list(folder.glob("*.h5ad"))) == n_copies
    assert digests(stream) == expected
    assert process.communicate(timeout=60) == (b"", b""), "a second line"
    assert process.returncode == 0
    assert not folder.exists()


def test_copies_of_a_killed_process_are_reused(manifest: Manifest, tmp_path: Path) -> None:
    expected = digests(stream_of(manifest, None))
    folder = tmp_path / "disk" / f"{PREFIX}1"
    process = copier(manifest, folder)
    stream = stream_of(manifest, folder)
    while not list(folder.glob("train-*")):
        time.sleep(0.001)
    process.kill()
    process.wait()
    (folder / ".train-00005.h5ad.incomplete").write_bytes(b"half")
    assert digests(stream) == expected
    for name in (f"{PREFIX}living", "other"):
        (folder.parent / name).mkdir()
        (folder.parent / name / LOCK).touch()
    with open(folder.parent / f"{PREFIX}living" / LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_abandoned(folder.parent)
    assert {path.name for path in folder.parent.iterdir()} == {f"{PREFIX}living", "other"}


def test_copies_lost_while_read_cost_one_warning(
    manifest: Manifest, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = digests(stream_of(manifest, None))
    folder = tmp_path / "disk"
    shutil.copytree(manifest.path.parent, folder)
    stream = stream_of(manifest, folder)
    batches = iter(stream)
    next(batches)
    for copy in folder.glob("train-*.h5ad"):
        os.truncate(copy, 5000)
    assert digests(stream) == [
        *expected[1:],
        *digests(stream_of(manifest, None), STEPS + 1)[STEPS:],
    ]
    warning = capfd.readouterr().err.splitlines()
    assert len(warning) == 1
    assert "a copy cannot be read (" in warning[0]
    assert f"are read from {manifest.path.parent}" in warning[0]


@pytest.mark.parametrize("first", [0, 20])
def test_the_shards_of_a_node_are_those_that_its_ranks_read(manifest: Manifest, first: int) -> None:
    stream = stream_of(manifest, None, rank=1, world=4)
    stream.load_state_dict(stream.state_dict() | {"epoch": first // 17, "step": first % 17})
    named = [path.name for path in stream.find_needed_shards({1}, first, first + 2)]
    cells: list[int] = []
    for batch in chain.from_iterable(islice(stream, 2)):
        cells += batch.cell_ids.tolist()
    stream.close()
    names = [shard.name for shard in manifest.splits["train"].shards]
    # the window's other cells are read too
    assert {names[cell // 100] for cell in cells} <= set(named)
    assert len(stream.find_needed_shards({1}, 0, 1)) < len(names)
    assert [path.name for path in stream.find_needed_shards({0, 1, 2, 3}, 0, 17)] == names


@pytest.mark.parametrize("n_cells", [53, 100, 101, 266, 533])
def test_needed_shards_are_known_after_few_of_many_epochs(manifest: Manifest, n_cells: int) -> None:
    stream = small_corpus.stream_of(manifest, max_cells=n_cells)
    needed = stream.find_needed_shards({0}, 0, 10**15)
    first_cells = range(0, n_cells, 100)
    assert len(needed) == len(first_cells)
    stream.close()


def test_shards_without_labelled_cells_are_not_waited_for(tmp_path: Path) -> None:
    kinds = pd.Categorical(["a"] * 3 + [None] * 530)
    manifest = write_corpus(tmp_path, 533, obs={"kind": kinds})
    codes = CellColumns(manifest, "train", "levels", ["kind"])[:][:, 0]
    labelled = np.flatnonzero(codes == 1)
    options = {"weight_by": "kind", "labelled_frac": 1.0}
    stream = small_corpus.stream_of(manifest, options=options)
    needed = stream.find_needed_shards({0}, 0, 10**15)
    stream.close()
    names = [shard.name for shard in manifest.splits["train"].shards]
    assert [path.name for path in needed] == [names[i] for i in np.unique(labelled // 100)]
    assert len(needed) < len(names)


def test_a_lane_without_cells_in_the_steps_needs_no_shard() -> None:
    # ten cells in four lanes and three steps: the step from cell 3 to 6 takes none of lane 2
    stream = Stream(lanes=4, block_cells=2, equal_steps=True)
    order = make_epoch_order(OrderRule(OrderOptions(stream, 4, seed=0), (5, 5)), epoch=0)
    assert order.find_shards([2], 1, 2) == set()
    assert order.find_shards([2], 2, 3)
