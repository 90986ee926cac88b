"""The folder of a run: its lock, checkpoints and curve; and a training of other options, data or
length in it.
"""

import errno
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cellmill.config.load import stored_options
from cellmill.errors import ConfigError, DataError
from cellmill.files import write_json
from cellmill.runs.folder import TrainFolder, cut_back, read_lines
from cellmill.runs.identity import changed_keys, identity, is_done
from cellmill.runs.jobs import write_if_room
from cellmill.runs.lock import FolderWatch, claim, find_holder, locked
from cellmill.stages.training_inputs import describe_reading
from cellmill.track.tracker import JsonlTracker
from tests.unit.test_rendezvous import NOBODY, as_user
from tests.unit.test_status import HOLD


def save(folder: TrainFolder, step: int, best_step: int | None, keep: int = 2) -> None:
    path = folder.begin(step)
    write_json(path / "state.json", {"progress": {"step": step, "best_step": best_step}})
    (path / "tensors").write_bytes(bytes(range(step)))
    folder.finish(path, keep)


FOLLOWER = """
import sys
from pathlib import Path
from cellmill.launch.signals import requests
from cellmill.runs.lock import locked
with locked(Path(sys.argv[1]), "busy", follows=True):
    print("starting", flush=True)
    sys.stdin.readline()
    with requests() as collected:
        print("following", flush=True)
        while collected.first is None:
            collected.wait(1)
"""


def test_a_follower_hands_over_as_soon_as_possible(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FOLLOWER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as follower:
        assert follower.stdout.readline() == "starting\n"
        with (
            pytest.raises(DataError, match="busy"),
            locked(tmp_path, "busy", wait_s=0.5, follows=True),
        ):
            pass
        assert follower.poll() is None
        follower.stdin.write("\n")
        follower.stdin.flush()
        assert follower.stdout.readline() == "following\n"
        follower.send_signal(signal.SIGSTOP)
        # the signal alone does not say that it has stopped
        os.waitid(os.P_PID, follower.pid, os.WSTOPPED | os.WNOWAIT)
        stopped = f"busy process {follower.pid} .*, which is stopped: `kill -CONT {follower.pid}` continues it"
        with (
            pytest.raises(DataError, match=stopped),
            locked(tmp_path, "busy {holder}", wait_s=0.5, follows=True),
        ):
            pass
        pending = re.search(
            r"^ShdPnd:\s*0*$", Path(f"/proc/{follower.pid}/status").read_text(), re.MULTILINE
        )
        assert pending is not None, "it would hand over once it continues, to nobody"
        follower.send_signal(signal.SIGCONT)
        with locked(tmp_path, "busy", follows=True):
            pass
    assert follower.returncode == 0


def steps(folder: TrainFolder) -> list[int]:
    return [checkpoint.step for checkpoint in folder.checkpoints()]


@pytest.mark.parametrize(
    ("saved", "kept", "best"),
    [
        ([(1, 1), (2, 2), (3, 2), (4, 2), (5, 2)], [2, 4, 5], 2),
        ([(1, 1), (2, 1), (3, 3)], [1, 2, 3], 3),  # step 2 may be resumed from, and 1 is its best
        ([(1, None), (2, None)], [1, 2], 2),
    ],
    ids=["newest and best", "best of an older one", "no validation"],
)
def test_the_newest_and_best_checkpoints_are_kept(
    tmp_path: Path, saved: list[tuple[int, int | None]], kept: list[int], best: int
) -> None:
    folder = TrainFolder(tmp_path)
    for step, best_step in saved:
        save(folder, step, best_step)
    # does not count
    shutil.copytree(folder.checkpoints()[0].path, tmp_path / "checkpoints" / "step-00000009-backup")
    assert (steps(folder), folder.best().step) == (kept, best)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove every file")
def test_a_checkpoint_that_cannot_be_removed_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = TrainFolder(tmp_path)
    save(folder, 1, None, keep=1)
    protected = folder.checkpoints()[0].path
    protected.chmod(0o500)
    save(folder, 2, None, keep=1)
    assert (steps(folder), folder.best().step) == ([1, 2], 2)
    assert f"warning: {protected} is not needed any more and cannot be" in capsys.readouterr().err
    protected.chmod(0o700)
    save(folder, 3, None, keep=1)
    assert steps(folder) == [3]


def test_a_step_after_the_end_of_a_run_is_named(tmp_path: Path) -> None:
    folder = TrainFolder(tmp_path)
    save(folder, 2, None)
    write_json(tmp_path / "status.json", {"state": "done", "step": 4})
    with pytest.raises(DataError, match=r"no checkpoint of step 5; .* ended at step 4, before it"):
        folder.find_checkpoint(5)
    with pytest.raises(DataError, match=r"no checkpoint of step 3; .* list the step in train\."):
        folder.find_checkpoint(3)


def without(name: str) -> Callable[[Path], None]:
    return lambda checkpoint: (checkpoint / name).unlink()


def as_file(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.touch()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without("state.json"), "/state.json: missing; the checkpoint is damaged"),
        (without("manifest.json"), "/manifest.json: no such file; the checkpoint is damaged"),
        (as_file, "/manifest.json: Not a directory; the checkpoint is damaged"),
    ],
    ids=["no state", "no manifest", "a file"],
)
def test_a_damaged_checkpoint_is_set_aside(
    tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    folder = TrainFolder(tmp_path)
    for step in (5, 10, 20):
        save(folder, step, 10, keep=3)
    path = tmp_path / "checkpoints" / "step-00000020"
    for damaged in (path, path.with_name("step-00000005")):
        spoil(damaged)
    folder.begin(30)  # does not count
    found, lines = folder.newest_whole()
    assert (found.step, lines) == (10, [f"{path}{said}"])
    folder.set_damaged_aside(found.step)
    save(folder, 15, 10, keep=1)
    assert steps(folder) == [10, 15]
    assert path.with_name("step-00000020.damaged").exists()


@pytest.mark.parametrize("text", ["{}", "[]", '{"files": 3}'])
def test_an_invalid_manifest_is_damage(tmp_path: Path, text: str) -> None:
    folder = TrainFolder(tmp_path)
    save(folder, 1, 1)
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json: not a checkpoint's manifest"):
        folder.newest_whole()


def test_a_missing_checkpoint_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    folder = TrainFolder(tmp_path)
    assert folder.newest_whole() == (None, [])
    with pytest.raises(DataError, match="no checkpoint; train the run first"):
        folder.best()
    save(folder, 2, 1)
    missing = r"no checkpoint of step 1; .*; the best checkpoint is missing; set consolidate\.checkpoint: last"
    with pytest.raises(DataError, match=missing):
        folder.best()


def test_files_of_an_earlier_configuration_are_moved(tmp_path: Path) -> None:
    folder = TrainFolder(tmp_path)
    save(folder, 3, 3)
    folder.metrics.write_text('{"step": 1}\n')
    assert folder.set_aside().name == "superseded-001"
    save(folder, 4, 4)
    assert folder.set_aside().name == "superseded-002"
    assert steps(folder) == []
    assert (tmp_path / "superseded-001" / "metrics.jsonl").exists()
    assert (
        tmp_path / "superseded-001" / "checkpoints" / "step-00000003" / "tensors"
    ).read_bytes() == bytes([0, 1, 2])
    shutil.rmtree(tmp_path / "superseded-001")
    assert folder.set_aside().name == "superseded-003"
    (tmp_path / "superseded-mine").mkdir()
    assert folder.set_aside().name == "superseded-004"


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_step_that_is_saved_again_is_never_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    folder = TrainFolder(tmp_path)
    save(folder, 2, 2)
    left = iter(range(renames))
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name.startswith("step-") and next(left, None) is None:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        patch.setattr("cellmill.runs.folder.fsync", lambda path: killed(path / "step-", path))
        with pytest.raises(KeyboardInterrupt):
            save(folder, 2, 2)
    newest, damaged = folder.newest_whole()
    assert newest is not None
    assert (newest.step, damaged) == (2, [])
    assert folder.best() == folder.find_checkpoint(2) == newest
    assert folder.checkpoint(newest.path.name) == newest
    for step in (2, 3, 4):
        save(folder, step, 2 if step < 4 else 4)
    assert sorted(path.name for path in folder.checkpoint_folder.iterdir()) == [
        f"step-{step:08}" for step in (2, 3, 4)
    ]
    save(folder, 5, 4)
    assert steps(folder) == [4, 5]


def test_two_trainings_do_not_share_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "locked\n"
        where = re.escape(str(tmp_path))
        expected = rf"{where}: another training is running here \(process {holder.pid} of .+ on .+\); end it"
        try:
            with pytest.raises(DataError, match=expected), TrainFolder(tmp_path).locked(wait_s=0.3):
                pass
        finally:
            holder.kill()
    assert re.fullmatch(
        f"{where}: locked by process {holder.pid} of .+; waiting up to 0.3 s for it\n",
        capsys.readouterr().out,
    )
    with TrainFolder(tmp_path).locked(wait_s=60):
        pass


def test_the_curve_is_truncated_to_the_checkpoint(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.start({}, 0)
    for step in range(1, 6):
        tracker.log(step, {"loss": 1 / step, "skipped_steps": 0})
    tracker.finish("done")
    with open(path, "a") as file:
        file.write('{"step": 3, "val_loss": 1}\n{"step": 6, "lo')
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4, 5, 3]
    assert cut_back(path, 3) == 3
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        *({"step": step, "loss": 1 / step, "skipped_steps": 0} for step in (1, 2, 3)),
        {"step": 3, "val_loss": 1},
    ]
    path.write_bytes(path.read_bytes().replace(b"0.5", b"0\xff5"))
    assert cut_back(path, 3) == 2
    path.unlink()
    assert cut_back(path, 3) == 0


TREE: dict[str, Any] = {
    "tokens": {"max_tokens": 64},
    "stream": {"lanes": 8, "io_threads": 4},
    "model": {"hidden": 8, "heads": 2},
    "parallel": {"strategy": "ddp"},
    "train": {"steps": 10, "lr": 0.1, "keep_checkpoints": 2, "token_budget": 100},
}


def changes(
    stored: dict[str, Any], init_from: str | None = None, **changed: dict[str, Any]
) -> dict[str, str]:
    """Changed keys between stored options and TREE with some sections changed."""
    tree = {section: keys | changed.get(section, {}) for section, keys in TREE.items()}
    now = identity(stored_options(tree, "now"), init_from)
    record = {"options": stored, "identity": identity(stored_options(TREE, "then"), None)}
    return changed_keys(record, now, "state.json")


def test_only_options_that_define_the_numbers_make_another_run() -> None:
    resolved = stored_options(TREE, "then").model_dump(mode="json")
    assert (
        changes(
            resolved,
            parallel={"strategy": "fsdp"},
            train={"keep_checkpoints": 9, "token_budget": 7},
        )
        == {}
    )
    assert changes(resolved, "abc", train={"lr": 0.2}) == {
        "init_from": "None -> abc",
        "train.lr": "0.1 -> 0.2",
    }


def test_an_option_added_later_is_no_change_at_its_default() -> None:
    resolved = stored_options(TREE, "then").model_dump(mode="json")
    for section, key in (
        ("train", "weight_decay"),
        ("stream", "window_blocks"),
        ("tokens", "tokenizer"),
    ):
        older = resolved | {
            section: {name: value for name, value in resolved[section].items() if name != key}
        }
        assert older[section] != resolved[section]
        assert changes(older) == {}
    older = resolved | {
        "train": {
            name: value for name, value in resolved["train"].items() if name != "weight_decay"
        }
    }
    default = resolved["train"]["weight_decay"]
    assert changes(older, train={"weight_decay": 0.5}) == {
        "train.weight_decay": f"{default} -> 0.5"
    }


@pytest.mark.parametrize(
    ("family", "gene_order", "changed"),
    [
        ("autoregressive", "genes", {"order of tokens": "as in the shards -> by rank"}),
        ("autoregressive", "rank", {}),
        ("encoder", "genes", {}),
    ],
)
def test_a_run_that_began_in_another_order_is_another_run(
    family: str, gene_order: str, changed: dict[str, str]
) -> None:
    objective = {"name": "next_gene" if family == "autoregressive" else "masked_value"}
    model = TREE["model"] | {"family": family}
    options = stored_options(TREE | {"model": model, "objective": objective}, "then")
    shards: Any = SimpleNamespace(gene_order=gene_order)
    now = identity(options, None) | describe_reading(options, shards)
    stored = {"options": options.model_dump(mode="json"), "identity": identity(options, None)}
    assert changed_keys(stored, now, "state.json") == changed
    assert changed_keys(stored | {"identity": now}, now, "state.json") == {}


@pytest.mark.parametrize(
    ("changes", "is_changed"),
    [
        ({}, False),
        ({"stream": {"weight_by": "cell_type"}}, True),
        ({"objective": {"name": "classification", "label_column": "cell_type"}}, True),
    ],
)
def test_a_run_that_rounded_its_reads_otherwise_is_another(
    changes: dict[str, Any], is_changed: bool
) -> None:
    options = stored_options(TREE | changes, "then")
    shards: Any = SimpleNamespace(gene_order="rank")
    now = identity(options, None) | describe_reading(options, shards)
    stored = {"options": options.model_dump(mode="json"), "identity": identity(options, None)}
    reads = {"rounding of reads": "the same in each epoch -> drawn in each epoch"}
    assert changed_keys(stored, now, "state.json") == (reads if is_changed else {})


def test_stored_options_of_a_metric_that_is_refused_now_are_read() -> None:
    train = TREE["train"] | {"best_metric": "effective_rank", "best_mode": "min"}
    stored = stored_options(TREE | {"train": train}, "then")
    assert (stored.train.best_metric, stored.train.best_mode) == ("effective_rank", "min")


def test_unreadable_stored_options_are_named_with_their_file() -> None:
    resolved = stored_options(TREE, "then").model_dump(mode="json")
    with pytest.raises(ConfigError, match=r"^state\.json: train: unknown key 'momentum'"):
        changes(resolved | {"train": resolved["train"] | {"momentum": 0.9}})


@pytest.mark.needs_root
def test_another_user_s_run_is_refused_with_its_owner_s_name() -> None:
    def attempt() -> bytes:
        try:
            with TrainFolder(train).locked():
                return b"locked"
        except DataError as error:
            return str(error).encode()

    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o755)
        train = Path(shared) / "train"
        with TrainFolder(train).locked():
            pass
        assert stat.S_IMODE(train.stat().st_mode) == 0o700
        said = as_user(NOBODY, attempt).decode()
        assert (
            said
            == f"{train}: this run belongs to root; give yours another name, or use a checkout of your own"
        )


def test_a_holder_on_another_host_is_not_signalled(tmp_path: Path) -> None:
    folder = TrainFolder(tmp_path)
    with folder.locked():
        (tmp_path / "lock").write_text(
            json.dumps({"pid": 1, "host": "login2", "user": "ada", "follows": True})
        )
        expected = r"another training is running here \(process 1 of ada on login2\); end it first"
        with (
            pytest.raises(DataError, match=expected),
            TrainFolder(tmp_path).locked(wait_s=0.3, follows=True),
        ):
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EROFS, 524])
def test_a_lease_takes_the_place_of_a_missing_flock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(number, "no locks here")

    monkeypatch.setattr("fcntl.flock", flock)
    for name, seconds in {"RENEW_S": 0.1, "LEASE_S": 1.5, "TICK_S": 0.05}.items():
        monkeypatch.setattr(f"cellmill.runs.lock.{name}", seconds)
    folder = TrainFolder(tmp_path)
    with folder.locked():
        holder = find_holder(tmp_path)
        assert holder is not None
        assert holder.pid == os.getpid()
        with pytest.raises(DataError, match="another training is running"), folder.locked(0.5):
            pass
    assert find_holder(tmp_path) is None
    with folder.locked(0.5):  # released: at once
        pass
    assert "this file system has no locks (no locks here)" in capsys.readouterr().out


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr("fcntl.flock", flock)


def test_a_process_that_lost_its_lease_ends(
    tmp_path: Path, no_flock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellmill.runs.lock.RENEW_S", 0.1)
    monkeypatch.setattr("cellmill.runs.lock.TICK_S", 0.05)
    with TrainFolder(tmp_path).locked():
        watch = FolderWatch(tmp_path)
        watch.check()
        # of another host, which did not see this one renew its claim
        (tmp_path / "lease" / "claims" / "00000002.json").write_text("{}")
        [thread] = [one for one in threading.enumerate() if one.name.endswith("(renew)")]
        thread.join(10)
        assert not thread.is_alive()
        with pytest.raises(DataError, match=r"another process has taken this run over"):
            watch.check()


def test_an_error_of_the_file_system_loses_no_lease(
    tmp_path: Path, no_flock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*given: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with TrainFolder(tmp_path).locked():
        with monkeypatch.context() as patch:
            patch.setattr("cellmill.runs.lock._newest", stale)
            watch = FolderWatch(tmp_path)
            watch.check()
        watch.check()
        with monkeypatch.context() as patch:
            patch.setattr("cellmill.runs.lock._newest", stale)
            watch.check()
        (tmp_path / "lease" / "claims" / "00000002.json").write_text("{}")
        with pytest.raises(DataError, match=r"another process has taken this run over"):
            watch.check()


def test_a_stopped_process_keeps_its_lease(
    tmp_path: Path, no_flock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellmill.runs.lock.LEASE_S", 0.1)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=-1) as holder:
        assert holder.stdout.readline()
        claim(tmp_path / "lease", str(holder.pid))
        holder.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        time.sleep(0.2)
        with pytest.raises(DataError, match="which is stopped"), TrainFolder(tmp_path).locked(0.3):
            pass
        found = find_holder(tmp_path)
        assert found is not None
        assert found.pid == holder.pid
        holder.kill()


def test_a_claim_is_kept_while_the_file_system_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = claim(tmp_path, "1")
    own.renewed = before = time.monotonic() - 60
    stale = OSError(errno.ESTALE, "Stale file handle")

    def fails(*given: object) -> None:
        raise stale

    with monkeypatch.context() as patch:
        patch.setattr("cellmill.runs.lock._newest", fails)
        own.renew()
        assert own.renewed == before
        patch.setattr(Path, "is_dir", fails)
        write_if_room(tmp_path / "attempt-000.json", {})
    own.renew()
    assert own.renewed > before


def test_a_lease_of_a_killed_process_is_taken_over(
    tmp_path: Path, no_flock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellmill.runs.lock.LEASE_S", 0.3)
    monkeypatch.setattr("cellmill.runs.lock.TICK_S", 0.05)
    claim(tmp_path / "lease", "1")
    began = time.monotonic()
    with TrainFolder(tmp_path).locked():
        assert time.monotonic() - began >= 0.3


def options(**train: Any) -> Any:
    length = {"steps": None} if "epochs" in train else {}
    return stored_options(TREE | {"train": TREE["train"] | length | train}, "test")


def wanted(total: int, data: str = "aaaa", **train: Any) -> tuple[dict[str, Any], int]:
    """run.json and `total` steps of a requested training."""
    given = train if "epochs" in train else {"steps": total} | train
    return {"identity": identity(options(**given), None), "fingerprint": data}, total


def trained(path: Path, step: int, given: Any = None, **progress: int) -> TrainFolder:
    """A run of 10 steps, of the options `given`, that has a checkpoint at `step`, with more of its
    progress.
    """
    given = options() if given is None else given
    folder = TrainFolder(path / "run" / "train")
    saved = folder.begin(step)
    progress = {"step": step, "best_step": step, **progress}
    state = {"progress": progress, "steps": 10, "world_size": 1, "fingerprint": "aaaa"}
    stored = {"options": given.model_dump(mode="json"), "identity": identity(given, None)}
    write_json(saved / "state.json", state | stored)
    folder.finish(saved, keep=2)
    if step == 10:
        write_json(folder.path / "status.json", {"state": "done"})
    return folder


def test_only_an_unfinished_run_of_other_reads_is_refused(tmp_path: Path) -> None:
    given = stored_options(TREE | {"stream": {"weight_by": "cell_type"}}, "then")
    reads = describe_reading(given, cast(Any, SimpleNamespace(gene_order="rank")))
    record = {"identity": identity(given, None) | reads, "fingerprint": "aaaa"}
    assert is_done(trained(tmp_path / "a", 10, given), record, 10)
    unfinished = trained(tmp_path / "b", 6, given)
    advice = "finish it with the version of cellmill that began it, or "
    with pytest.raises(ConfigError, match=advice):
        is_done(unfinished, record, 10)


@pytest.mark.parametrize(("step", "steps"), [(6, 20), (10, 20)])
def test_a_finished_run_continues_to_a_greater_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, steps: int
) -> None:
    folder = trained(tmp_path, step)
    assert not is_done(folder, *wanted(steps))
    assert capsys.readouterr().out == (
        f"{folder.path}: going on from step {step} of 10, now {steps}: from here the learning rate is that of a run of "
        "the new length\n"
    )
    assert not (folder.path / "status.json").exists()
    assert folder.saved_step() == step


def test_a_damaged_checkpoint_is_named_only_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, 6)
    folder = trained(tmp_path, 10)
    path = folder.checkpoint_folder / "step-00000010"
    (path / "state.json").write_text("{}")  # of another size, hashed as a finished run's
    assert not is_done(folder, *wanted(10))
    error = capsys.readouterr().err
    assert error.startswith(f"warning: {path}/state.json: ")
    assert error.endswith("; going on from the one before it\n")
    assert error.count("\n") == 1
    found, damaged = folder.newest_whole()
    assert found is not None
    assert (found.step, damaged) == (6, [])


def test_a_run_that_ended_early_is_done_at_any_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path, 6, stale_validations=3)
    for steps in (10, 20):
        assert is_done(folder, *wanted(steps, early_stop_patience=3))
    assert (
        "ended early at step 6, after 3 validations without an improvement; raise train.early_stop_patience (3)"
        in (capsys.readouterr().out)
    )
    assert json.loads((folder.path / "status.json").read_text())["state"] == "done"
    assert not is_done(folder, *wanted(10, early_stop_patience=4))
    assert not (folder.path / "status.json").exists()


@pytest.mark.parametrize("length", [{"epochs": 2.0}, {"steps": "auto"}], ids=str)
def test_equal_lengths_written_differently_are_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: dict[str, Any]
) -> None:
    assert is_done(trained(tmp_path / "a", 10), *wanted(10, **length))
    assert not is_done(trained(tmp_path / "b", 6), *wanted(10, **length))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("step", "steps"), [(6, 6), (10, 9)])
def test_a_length_that_ends_before_the_step_reached_is_refused(
    tmp_path: Path, step: int, steps: int
) -> None:
    folder = trained(tmp_path, step)
    with pytest.raises(ConfigError) as error:
        is_done(folder, *wanted(steps))
    assert str(error.value) == (
        f"{folder.path}: it holds a training of {step} steps, and 10 steps in all were lowered to {steps}; set "
        f"train.steps above {step}, or set that training aside and start afresh with `cellmill train --restart` (of a "
        "workflow: `cellmill run -- --config restart=run`)"
    )
    assert (folder.path / "status.json").exists() == (step == 10)


@pytest.mark.parametrize("step", [6, 10])
def test_other_data_are_refused_unless_a_restart_is_requested(tmp_path: Path, step: int) -> None:
    folder = trained(tmp_path, step)
    for steps in (10, 20):
        with pytest.raises(
            ConfigError, match=r"trained on data aaaa, the shards are now bbbb; .* --restart`"
        ):
            is_done(folder, *wanted(steps, "bbbb"))
    # a changed column of weights changes the fingerprint as well, and is named instead of the shards
    record, n_steps = wanted(10, "bbbb")
    record["identity"] |= {"stream.weight_by": "kind"}
    with pytest.raises(ConfigError) as error:
        is_done(folder, record, n_steps)
    assert "(stream.weight_by None -> kind); change it back" in str(error.value)
    assert "restore the shards" not in str(error.value)
    assert not is_done(folder, *wanted(10, "bbbb"), restart=True)
    assert (folder.saved_step(), (folder.path / "status.json").exists()) == (0, False)


def test_a_restart_of_the_same_run_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path, 6)
    assert not is_done(folder, *wanted(10), restart=True)
    assert folder.saved_step() == 6
    assert "--restart changes nothing" in capsys.readouterr().out


def test_a_restart_with_another_length_sets_the_run_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path, 6)
    assert not is_done(folder, *wanted(20), restart=True)
    assert capsys.readouterr().out == (
        f"restart (train.steps 10 -> 20): the earlier training is now in {folder.path}/superseded-001\n"
    )
    saved = folder.path / "superseded-001" / "checkpoints" / "step-00000006" / "state.json"
    assert json.loads(saved.read_text())["steps"] == 10
