"""Checkpoints resume in any layout, and a resumed run equals the uninterrupted one."""

import errno
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cellmill.config.run import Train
from cellmill.errors import DataError
from cellmill.runs.folder import TrainFolder
from cellmill.train.checkpoint import CheckpointReader, Checkpoints, load_tensors
from cellmill.train.optimizer import build_optimizer
from cellmill.train.stored import load_whole
from tests.distributed import cases
from tests.distributed.conformance import LAYOUTS
from tests.distributed.conftest import options
from tests.distributed.pool import Pool
from tests.unit.limits import full_after


@pytest.fixture(scope="module")
def half(pool: Pool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps in HYBRID_SHARD, with a checkpoint every 4."""
    folder = tmp_path_factory.mktemp("half")
    each = options(LAYOUTS["HYBRID_SHARD"], train={"steps": 8, "checkpoint_every_steps": 4})
    pool.run("curve", corpus=corpus, options=each, folder=str(folder), steps=8)
    shutil.rmtree(folder / "checkpoints" / "step-00000008")
    return folder


def test_resuming_in_the_same_layout_is_bitwise_exact(
    pool: Pool, corpus: str, half: Path, tmp_path: Path
) -> None:
    same = options(LAYOUTS["HYBRID_SHARD"], train={"steps": 8})
    whole = pool.run("curve", corpus=corpus, options=same, folder=str(tmp_path / "whole"), steps=8)
    shutil.copytree(half, tmp_path / "run")
    resumed = pool.run(
        "curve", corpus=corpus, options=same, folder=str(tmp_path / "run"), steps=8, load=True
    )
    assert resumed[0] == whole[0][-len(resumed[0]) :]
    assert len(resumed[0]) == 4


def test_a_pickle_planted_in_the_index_is_never_run(
    alone: None, half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "ran"

    class Planted:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (eval, (f"open({str(trace)!r}, 'w').close()",))

    shutil.copytree(half, tmp_path / "run")
    folder = TrainFolder(tmp_path / "run")
    [checkpoint] = folder.checkpoints()
    (checkpoint.path / ".metadata").write_bytes(pickle.dumps(Planted()))
    assert CheckpointReader(checkpoint.path).read_metadata().state_dict_metadata
    reads: list[Path] = []
    for name in ("read_bytes", "read_text"):
        read = getattr(Path, name)
        monkeypatch.setattr(
            Path, name, lambda path, read=read, **k: reads.append(path) or read(path, **k)
        )
    model = torch.nn.Linear(1, 1)
    with pytest.raises(DataError, match=r"step-00000004: cannot be loaded \(.*Missing key"):
        Checkpoints(folder, 1).load(checkpoint, model, build_optimizer(model, Train(steps=1)))
    assert [path.name for path in reads] == ["index.json"]
    (checkpoint.path / "index.json").unlink()
    with pytest.raises(
        DataError,
        match=r"no index\.json; expected a checkpoint of this version, train the run again$",
    ):
        load_tensors(checkpoint.path, {"model.weight": torch.zeros(3)})
    assert not trace.exists()


def test_the_index_agrees_with_the_pickle_it_replaces(half: Path, tmp_path: Path) -> None:
    shutil.copytree(half / "checkpoints" / "step-00000004", tmp_path / "checkpoint")
    whole = CheckpointReader(tmp_path / "checkpoint").read_metadata()
    pickled = pickle.loads((tmp_path / "checkpoint" / ".metadata").read_bytes())  # noqa: S301
    assert {at: vars(place) for at, place in whole.storage_data.items()} == {
        at: {"transform_descriptors": None} | vars(place)
        for at, place in pickled.storage_data.items()
    }
    for name, of in pickled.state_dict_metadata.items():
        found = whole.state_dict_metadata[name]
        assert (found.size, found.chunks) == (of.size, of.chunks)
        assert found.properties.dtype == of.properties.dtype
    name = next(name for name, of in whole.state_dict_metadata.items() if len(of.chunks) > 1)
    first = whole.state_dict_metadata[name].chunks[0]
    asked = {name: torch.zeros(first.sizes)}  # of a whole tensor's place, as far as its first part
    own = CheckpointReader(tmp_path / "checkpoint", asked).read_metadata()
    assert [*own.state_dict_metadata] == [name]
    assert own.state_dict_metadata[name].chunks == [first]
    assert [at.offset for at in own.storage_data] == [first.offsets]
    by_dcp = {
        name: torch.zeros(of.size, dtype=of.properties.dtype)
        for name, of in whole.state_dict_metadata.items()
    }
    by_bytes = {name: torch.ones_like(tensor) for name, tensor in by_dcp.items()}
    load_tensors(tmp_path / "checkpoint", by_dcp)
    load_whole(tmp_path / "checkpoint", by_bytes)
    assert all(torch.equal(by_bytes[name], tensor) for name, tensor in by_dcp.items())
    with pytest.raises(
        DataError,
        match=r"cannot be loaded \(ValueError: .*: expected \(7,\), got parts of .*damaged$",
    ):
        load_whole(tmp_path / "checkpoint", {name: torch.zeros(7)})


def test_missing_states_of_the_optimizer_are_named(alone: None, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = build_optimizer(model, Train(steps=1))
    checkpoints = Checkpoints(TrainFolder(tmp_path), 1)
    checkpoints.save(model, optimizer, 1, {"progress": {"best_step": None}})
    checkpoints.wait()
    [checkpoint] = checkpoints.folder.checkpoints()
    checkpoints.load(checkpoint, model, optimizer)
    file = checkpoint.path / "index.json"
    index = json.loads(file.read_text())
    key = "optimizer.state.1.weight.exp_avg_sq"
    for prefix, reason in (
        (key, rf"cannot be loaded \([^\n]*Missing key [^\n]*{key}\.\)"),
        (
            "optimizer.",
            r"has no state of the optimizer \(all 12 tensors are missing, such as optimizer\.state\.0\.bias\.exp_avg\)",
        ),
    ):
        kept = {k: v for k, v in index["tensors"].items() if not k.startswith(prefix)}
        assert len(kept) < len(index["tensors"])
        file.write_text(json.dumps(index | {"tensors": kept}))
        with pytest.raises(
            DataError,
            match=f"^{re.escape(str(checkpoint.path))}: {reason}; the checkpoint is damaged$",
        ):
            checkpoints.load(checkpoint, model, optimizer)


CONSOLIDATE = """
import sys
from pathlib import Path
from cellmill.cli import main
assert main(sys.argv[1:]) == 0
status = Path("/proc/self/status").read_text()
print(int(status.partition("VmHWM:")[2].split()[0]) << 10)
"""


@pytest.mark.full
def test_consolidating_takes_one_model_and_little_more(
    alone: None, corpus: str, tmp_path: Path
) -> None:
    pytest.importorskip("safetensors", minversion="0.8")  # 0.5 copies all tensors to write them
    peaks = []
    sizes = []
    for hidden in (16, 368):
        folder = tmp_path / f"{hidden}"
        model = {"hidden": hidden, "layers": 32, "heads": 4}
        cases.trained(corpus, options(model=model), str(folder), 1)
        words = ["consolidate", "--options", '{"consolidate": {"checkpoint": "last"}}']
        words += ["--vocabulary", f"{corpus}/vocabulary.tsv", "--train", str(folder)]
        made = subprocess.run(
            [sys.executable, "-c", CONSOLIDATE, *words, "--out", str(folder / "model")],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        peaks.append(int(made.stdout.split()[-1]))
        sizes.append((folder / "model" / "model.safetensors").stat().st_size)
    n_bytes = sizes[1] - sizes[0]
    assert n_bytes > 200e6  # a second model is above the bound
    assert peaks[1] - peaks[0] < n_bytes + 100e6


OF_A = {"dtype": "float32", "size": [2], "offsets": [0], "sizes": [2], "file": [0]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        (
            '{"files": ["../a"], "tensors": {}}',
            "not a checkpoint's index (ValueError: '../a' is elsewhere)",
        ),
        (
            json.dumps({"files": ["b"], "tensors": {"a": OF_A}}),
            "not a checkpoint's index (KeyError: 'start')",
        ),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "index.json").write_text(text)
    for load in (load_tensors, load_whole):
        with pytest.raises(DataError, match=re.escape(f"{tmp_path / 'index.json'}: {reason}")):
            load(tmp_path, {"a": torch.zeros(2)})


@pytest.fixture
def run(half: Path, tmp_path: Path) -> Path:
    """A copy of the run with whole checkpoints of the steps 4 and 6, and one of step 8 that lost
    its manifest.
    """
    shutil.copytree(half, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (6, 8):
        shutil.copytree(checkpoints / "step-00000004", checkpoints / f"step-{step:08}")
    (checkpoints / "step-00000008" / "manifest.json").unlink()
    return tmp_path / "run"


def test_a_damaged_checkpoint_falls_back_to_the_one_before(run: Path) -> None:
    for step in (6, 4):
        file = next((run / "checkpoints" / f"step-{step:08}").glob("*.distcp"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        if step == 6:
            found, damaged = TrainFolder(run).newest_whole()
            assert found is not None
            assert (found.step, len(damaged), str(file) in damaged[1]) == (4, 2, True)
    with pytest.raises(DataError, match=r"every checkpoint is damaged .* start again at step 0"):
        TrainFolder(run).newest_whole()


def test_every_rank_learns_of_damage_found_by_one(pool: Pool, run: Path) -> None:
    files = sorted((run / "checkpoints" / "step-00000006").glob("*.distcp"))
    files[-1].write_bytes(files[-1].read_bytes()[:-1])
    found = pool.run("newest", folder=str(run))
    assert len(found) == len(files) == 4
    assert all(step == 4 and str(files[-1]) in damaged[1] for step, damaged in found)
    expected = [{"rank": rank, "text": "ü" * rank, "none": None} for rank in range(4)]
    assert pool.run("gathered") == [expected] * 4


def test_a_later_save_in_the_same_memory_stores_its_step(
    alone: None, corpus: str, tmp_path: Path
) -> None:
    opts = options(train={"checkpoint_every_steps": 2, "keep_checkpoints": 9})
    whole = cases.curve(corpus, opts, str(tmp_path / "run"), steps=8)
    for step in (2, 4, 6):
        folder = tmp_path / f"from-{step}"
        (folder / "checkpoints").mkdir(parents=True)
        name = f"step-{step:08}"
        (folder / "checkpoints" / name).symlink_to(tmp_path / "run" / "checkpoints" / name)
        assert cases.curve(corpus, opts, str(folder), steps=8, load=True) == whole[step:]


def test_a_save_that_fails_is_an_error_of_the_run(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TrainFolder, "finish", full)
    model = torch.nn.Linear(1, 1)
    checkpoints = Checkpoints(TrainFolder(tmp_path), 1)
    checkpoints.save(model, build_optimizer(model, Train(steps=1)), 3, {})
    with pytest.raises(
        DataError, match=r"of step 3 could not be written \(.*No space left on device\); earlier"
    ):
        checkpoints.wait()


KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
from cellmill.config.run import Train
from cellmill.runs.folder import TrainFolder
from cellmill.train import checkpoint
from cellmill.train.failure import leave_reason
from cellmill.train.optimizer import build_optimizer

folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
if rank == 1:
    checkpoint._Writer.write_data = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
model = torch.nn.Linear(1, 1)
checkpoints = checkpoint.Checkpoints(TrainFolder(folder), 1)
checkpoints.save(model, build_optimizer(model, Train(steps=1)), 3, {})
try:
    checkpoints.wait()
except Exception as error:
    leave_reason(folder / "error.txt", error, folder)
    os._exit(7)
"""


def test_a_process_lost_during_a_save_is_no_full_disk(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    command = [sys.executable, "-c", KILLED_WHILE_WRITING, str(tmp_path)]
    ranks = [
        subprocess.Popen(command, env=os.environ | {"RANK": rank, "OMP_NUM_THREADS": "1"})
        for rank in ("0", "1")
    ]
    assert [process.wait(100) for process in ranks] == [7, -signal.SIGKILL]
    # the launcher restarts a job without a reason of its own from the last checkpoint
    assert not (tmp_path / "error.txt").exists()
    line = (tmp_path / "connection.txt").read_text()
    assert re.match(r"rank 0 on \S+: \w+ failed: .*gloo", line)


def test_a_disk_that_fills_up_inside_a_tensor_is_named(alone: None, tmp_path: Path) -> None:
    model = torch.nn.Linear(1000, 100)
    checkpoints = Checkpoints(TrainFolder(tmp_path), 1)
    checkpoints.save(model, build_optimizer(model, Train(steps=1)), 3, {})
    checkpoints.wait()
    with full_after(50_000):
        checkpoints.save(model, build_optimizer(model, Train(steps=1)), 4, {})
        with pytest.raises(
            DataError,
            match=r"of step 4 could not be written \(a file was cut off: the disk is full, or ",
        ):
            checkpoints.wait()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
