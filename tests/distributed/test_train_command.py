"""`cellmill train` as a user runs it: real torchrun, real signals, real kills."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from cellmill.files import sha256_file
from tests.distributed.command import Run
from tests.distributed.conftest import options

STEPS = 20
TWO_STEPS = options(train={"steps": 2})
ENDLESS = {"steps": 2000, "checkpoint_every_steps": 10_000, "val_every_steps": 10_000}
CELL = r"sim:\S+ \(train-\S+\.h5ad row \d+\)"


@pytest.fixture
def run(corpus: str, tmp_path: Path) -> Run:
    return Run(corpus, tmp_path / "train")


@pytest.fixture
def whole(corpus: str, tmp_path: Path) -> Run:
    """Another run, to be uninterrupted."""
    return Run(corpus, tmp_path / "whole")


@pytest.fixture(scope="module")
def one(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of one process."""
    run = Run(corpus, tmp_path_factory.mktemp("one") / "train")
    run.train(options(train={"steps": STEPS}))
    return run


@pytest.fixture
def copy_of_one(run: Run, one: Run) -> Run:
    shutil.copytree(one.out, run.out)
    return run


@pytest.fixture
def copied(corpus: str, tmp_path: Path) -> Path:
    """A copy of the corpus whose shards are not yet verified."""
    shutil.copytree(corpus, tmp_path / "corpus", ignore=shutil.ignore_patterns("verified.json"))
    return tmp_path / "corpus"


def test_the_curve_survives_kills_stops_and_extensions(
    run: Run, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "disk"))
    limit_gb = 1.01e-9 * max(
        path.stat().st_size for path in Path(run.corpus, "shards").glob("*.h5ad")
    )
    staged = {"stage_to": "$NODE_DISK", "stage_limit_gb": limit_gb}

    def of(steps: int, **stream: Any) -> dict[str, Any]:
        often = {"checkpoint_every_steps": 10, "val_every_steps": 20, "schedule": "constant"}
        return options({"strategy": "ddp"}, train={"steps": steps} | often, stream=stream)

    whole.train(of(110), nproc_per_node=2)
    run.start(of(100, **staged), until=12, nproc_per_node=2, max_restarts=1)
    run.worker(1).kill()
    run.wait_for_start(2)
    run.wait_for_step(22)
    run.process.send_signal(signal.SIGTERM)
    log = run.end(75)
    step = run.read("state.json")["step"]
    assert "starting all again from the last checkpoint, restart 1 of 1\n" in log
    copied = rf"copied [1-9] of \d shards, 0.00 GB, to {tmp_path / 'disk'} in \d+ s, as many as stream.stage_limit_gb "
    assert re.search(f"{copied}allows", log)
    assert 22 <= step < 100
    assert log.splitlines()[-1] == (
        f"cellmill train: stopped at step {step} of 100, saved; run the same command to resume"
    )
    assert f"going on from step {step}\n" in run.train(of(100), nproc_per_node=2)[0]
    assert run.train(of(100), nproc_per_node=2)[0] == f"{run.out}: this run is already done\n"
    longer = run.train(of(110), nproc_per_node=2)[0]
    assert (
        f"{run.out}: going on from step 100 of 100, now 110: from here the learning rate" in longer
    )
    assert run.losses == whole.losses
    files = [each.read("checkpoints/step-00000110/manifest.json")["files"] for each in (run, whole)]
    tensors = [
        {name: file["sha256"] for name, file in of.items() if name.endswith(".distcp")}
        for of in files
    ]
    assert tensors[0] == tensors[1]
    assert list((tmp_path / "disk").iterdir()) == [], "a copy of the shards is left"


def test_a_run_stored_before_an_option_was_added_is_done(
    copy_of_one: Run,
) -> None:
    checkpoint = max((copy_of_one.out / "checkpoints").glob("step-*"))
    state = json.loads((checkpoint / "state.json").read_text())
    for section, key in (("train", "weight_decay"), ("train", "seed"), ("stream", "io_threads")):
        del state["options"][section][key]
        state["identity"].pop(f"{section}.{key}", None)
    rewrite_state(checkpoint, state)
    again, _ = copy_of_one.train(options(train={"steps": STEPS}))
    assert again == f"{copy_of_one.out}: this run is already done\n"
    _, other = copy_of_one.train(options(train={"steps": STEPS, "weight_decay": 0.3}), code=2)
    assert "another configuration (train.weight_decay 0.1 -> 0.3); change it back" in other


def rewrite_state(checkpoint: Path, state: dict[str, Any]) -> None:
    """Replace a checkpoint's state.json, and update its manifest."""
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    size = (checkpoint / "state.json").stat().st_size
    manifest["files"]["state.json"] = {
        "bytes": size,
        "sha256": sha256_file(checkpoint / "state.json"),
    }
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def of_long(steps: int = 200) -> dict[str, Any]:
    """Options of a run whose steps equal the first ones of `long`."""
    often = {"checkpoint_every_steps": 10, "val_every_steps": 50, "schedule": "constant"}
    return options(train={"steps": steps} | often)


@pytest.fixture(scope="module")
def long(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run of two nodes with a process each."""
    run = Run(corpus, tmp_path_factory.mktemp("long") / "train")
    run.train(of_long(), nodes=2)
    return run


@pytest.mark.full
def test_the_curve_survives_kill_9_of_any_process(run: Run, long: Run) -> None:
    given = of_long()
    run.start(given, until=15, nodes=2, max_restarts=2)
    run.worker().kill()
    run.wait_for_start(2)
    run.wait_for_step(40)
    run.worker().parent().kill()
    run.wait_for_start(3)
    run.wait_for_step(70)
    run.process.kill()
    log = run.end(-signal.SIGKILL)
    assert len(re.findall(r"going on from step [1-9]\d*0\n", log)) == 2
    assert "starting all again from the last checkpoint, restart 1 of 2\n" in log
    assert "a process was lost (signal 9): starting all again" in log
    assert not (run.out / "status.json").exists()
    run.train(given, nodes=2)
    assert run.losses == long.losses
    assert run.read("status.json")["best_val_loss"] == long.read("status.json")["best_val_loss"]


def test_a_single_process_runs_without_an_agent(run: Run, whole: Run) -> None:
    given = options(
        train={"steps": 120, "checkpoint_every_steps": 10_000, "val_every_steps": 10_000}
    )
    whole.train(given)
    run.start(given, until=5, max_restarts=1)
    assert run.worker().ppid() == run.process.pid
    run.worker().kill()
    run.wait_for_start(2)
    run.wait_for_step(10)
    run.process.kill()
    assert "a process was lost (signal 9): starting all again" in run.end(-signal.SIGKILL)
    state = run.read("state.json")
    assert (state["state"], (run.out / f"checkpoints/step-{state['step']:08}").exists()) == (
        "stopped",
        True,
    )
    assert f"going on from step {state['step']}\n" in run.train(given)[0]
    assert run.losses == whole.losses


@pytest.mark.full
def test_one_of_two_agents_continues_if_the_other_is_lost(run: Run, long: Run) -> None:
    given = of_long(60)
    run.start(given, until=25, nodes=2)
    run.worker(1).parent().kill()
    run.end(2)
    assert re.search(r"^going on from step [1-9]\d*0$", run.train(given)[0], re.M)
    assert run.read("status.json")["world_size"] == 1
    first = {step: loss for step, loss in long.losses.items() if step <= 60}
    assert run.losses == pytest.approx(first, abs=1e-4)


SIGNALS: list[tuple[str, bool, dict[str, Any]]] = [
    ("SIGINT", True, {}),
    ("SIGHUP", True, {"tp": 2, "sequence_parallel": True}),
    ("SIGUSR1", True, {"pp": 2}),
    ("SIGUSR2", False, {"sharding_strategy": "FULL_SHARD"}),
    ("SIGTERM", False, {"tp": 2, "sequence_parallel": True}),
]
"""SIGTERM to the command is in the life of a run above, SIGUSR2 in that on SLURM."""


@pytest.mark.full
@pytest.mark.parametrize(("number", "to_command", "layout"), SIGNALS, ids=str)
def test_a_signal_to_any_process_saves_at_one_common_step(
    run: Run, number: str, to_command: bool, layout: dict[str, Any]
) -> None:
    run.start(
        options(layout, train=ENDLESS),
        until=5,
        nproc_per_node=2,
        max_restarts=0 if to_command else 2,
    )
    (run.process if to_command else run.worker(1)).send_signal(signal.Signals[number])
    log = run.end(75)
    state = run.read("state.json")
    assert state["state"] == "stopped"
    assert [path.name for path in (run.out / "checkpoints").iterdir()] == [
        f"step-{state['step']:08}"
    ]
    last = f"cellmill train: stopped at step {state['step']} of 2000, saved; run the same command to resume"
    assert log.splitlines()[-1] == last
    assert not [
        trouble
        for trouble in ("unwaited", "redistributing", "starting all again")
        if trouble in log
    ], log


@pytest.mark.full
def test_a_hanging_rank_is_named_with_its_node(run: Run) -> None:
    run.start(options(train=ENDLESS | {"timeout_s": 20}), until=3, nproc_per_node=2, max_restarts=0)
    run.worker(1).suspend()
    assert re.fullmatch(
        rf"cellmill train: rank 1 on {os.uname().nodename} does not respond; the other ranks have waited 20 s "
        r"\(train\.timeout_s\) at the [a-z ]+ of step \d+",
        run.end(2).splitlines()[-1],
    )


@pytest.mark.full
def test_a_rank_that_hangs_is_restarted_with_the_same_curve(run: Run, whole: Run) -> None:
    # many steps: on a busy machine the worker is suspended long after step 25
    given = options(train={"steps": 200, "checkpoint_every_steps": 10, "timeout_s": 20})
    whole.train(given, nproc_per_node=2)
    run.start(given, until=25, nproc_per_node=2, max_restarts=1)
    run.worker(1).suspend()
    printed = run.end(0)
    assert re.search(
        r"^rank 1 on \S+ does not respond; .*: starting all again from the last checkpoint",
        printed,
        re.M,
    )
    assert run.losses == whole.losses


def test_another_configuration_is_refused_before_any_change(one: Run) -> None:
    before = one.files
    _, error = one.train(options(train={"steps": STEPS, "lr": 5e-3}), code=2)
    assert error == (
        f"cellmill train: {one.out}: it holds a training of {STEPS} steps with another configuration (train.lr 0.001 "
        "-> 0.005); change it back, or set that training aside and start afresh with `cellmill train --restart` (of a "
        f"workflow: `cellmill run -- --config restart={one.out.parent.name}`)\n"
    )
    assert one.files == before


def test_changed_shards_are_refused_before_any_change(
    copy_of_one: Run,
) -> None:
    checkpoint = next((copy_of_one.out / "checkpoints").iterdir())
    saved = json.loads((checkpoint / "state.json").read_text())
    rewrite_state(checkpoint, saved | {"fingerprint": "0" * 64, "steps": 99})
    before = copy_of_one.files
    _, error = copy_of_one.train(options(train={"steps": STEPS}), code=2)
    assert error == (
        f"cellmill train: {copy_of_one.out}: its checkpoints were trained on data 000000000000, the shards are now "
        f"{saved['fingerprint'][:12]}; restore the shards, or train on the new ones with `cellmill train --restart`, "
        "which sets these aside\n"
    )
    assert copy_of_one.files == before


def test_a_loss_that_is_not_finite_stops_with_one_line(run: Run) -> None:
    wild = options(train={"steps": 50, "lr": 1e38, "warmup_steps": 0, "clip_norm": None})
    out, error = run.train(wild, max_restarts=2, code=2)
    assert "starting all again" not in out
    assert re.fullmatch(
        r"cellmill train: loss (nan|inf) and gradient norm (nan|inf) at step \d+, the last of 5 bad steps in a row "
        r"\(train\.max_bad_steps 5\): lower train\.lr \(1e\+38\) or raise train\.warmup_steps; earlier checkpoints are "
        rf"intact; rank 0 had {CELL}, {CELL}, {CELL}, {CELL} and 12 more cells \(see the log\)",
        error.splitlines()[-1],
    ), error
    assert len(re.findall(CELL, out)) == 16
    run.none_left()


def test_a_damaged_shard_is_named_before_training(copied: Path, tmp_path: Path) -> None:
    shard = next((copied / "shards").glob("train*.h5ad"))
    run = Run(copied, tmp_path / "train")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    _, error = run.train(TWO_STEPS, code=2)
    expected = (
        rf"cellmill train: {shard}: expected sha256 \w{{12}} as in the manifest, got \w{{12}}: .+"
    )
    assert re.fullmatch(expected, error.splitlines()[-1])
    assert not (copied / "shards" / "verified.json").exists()
    assert not (run.out / "checkpoints").exists()


def test_an_impossible_layout_is_refused_before_any_process(copied: Path, tmp_path: Path) -> None:
    path = copied / "vocabulary.tsv"
    run = Run(copied, tmp_path / "train")
    _, error = run.train(options({"shard_size": 3}), nproc_per_node=4, code=2)
    assert (error.count("\n"), "shard_size" in error) == (1, True)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    _, error = run.train(TWO_STEPS, code=2)
    expected = (
        rf"cellmill train: {path}: its digest is \w{{12}}, the shards were made with \w{{12}}; .+\n"
    )
    assert re.fullmatch(expected, error)
    assert not (run.out / "run.json").exists()
