"""`cellmill train` as a user runs it: real torchrun, real signals, real kills."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cellmill.cli import main
from cellmill.files import sha256_file
from cellmill.runs.progress import read_lines
from tests.distributed.conftest import options

STEPS = 20
WITHIN_S = 580  # of a machine that is busy


def command(
    corpus: str, out: Path, opts: dict[str, Any], nodes: int = 1, nproc: int = 1, max_restarts: int = 0
) -> list[str]:
    return [
        *(sys.executable, "-m", "cellmill.cli", "train", "--options", json.dumps(opts), "--out", str(out)),
        *("--manifest", f"{corpus}/shards/manifest.json", "--vocabulary", f"{corpus}/vocabulary.tsv"),
        *("--nodes", str(nodes), "--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts)),
    ]


def train(corpus: str, out: Path, opts: dict[str, Any], **machine: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(corpus, out, opts, **machine), capture_output=True, text=True, timeout=WITHIN_S)


def start(corpus: str, out: Path, opts: dict[str, Any], **machine: int) -> subprocess.Popen[str]:
    with open(out.with_suffix(".log"), "a") as log:
        return subprocess.Popen(command(corpus, out, opts, **machine), stdout=log, stderr=log, text=True)


def losses(out: Path) -> dict[int, float]:
    lines = [line for line in read_lines(out / "metrics.jsonl") if "loss" in line]
    assert len({line["step"] for line in lines}) == len(lines), "a step is in the curve twice"
    return {line["step"]: line["loss"] for line in lines}


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    give_up = time.monotonic() + WITHIN_S
    log = out.with_suffix(".log")
    while not any(line["step"] >= step for line in read_lines(out / "metrics.jsonl")):
        assert process.poll() is None, f"ended with {process.returncode} before step {step}:\n{log.read_text()}"
        assert time.monotonic() < give_up, f"no step {step} within {WITHIN_S} s"
        time.sleep(0.02)


def processes_of(out: Path, without: str = "") -> list[psutil.Process]:
    """Agents and workers."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if "cellmill.train.worker" in words and str(out) in words and without not in words:
            found.append(process)
    return found


def workers_of(out: Path) -> list[psutil.Process]:
    return processes_of(out, without="cellmill.launch.agent")


def worker(out: Path, rank: int) -> psutil.Process:
    return next(process for process in workers_of(out) if process.environ().get("RANK") == str(rank))


def none_left(out: Path, within_s: float = 300) -> bool:
    """Wait until no agent and no worker is alive; False if some are."""
    give_up = time.monotonic() + within_s
    while processes_of(out) and time.monotonic() < give_up:
        time.sleep(0.1)
    return not processes_of(out)


def long_run(steps: int = 400) -> dict[str, Any]:
    """Enough steps for a signal to come before the end."""
    return options(train={"steps": steps, "checkpoint_every_steps": 10, "val_every_steps": 50})


@pytest.fixture(scope="module")
def one(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "train"
    done = train(corpus, out, options(train={"steps": STEPS}))
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.full
def test_hybrid_shard_on_two_nodes_of_two_ends_with_the_loss_of_one_process(
    corpus: str, one: Path, tmp_path: Path
) -> None:
    four = options({"strategy": "fsdp", "sharding_strategy": "HYBRID_SHARD"}, train={"steps": STEPS})
    done = train(corpus, tmp_path / "train", four, nodes=2, nproc=2)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "train" / "status.json").read_text())["world_size"] == 4
    assert losses(tmp_path / "train")[STEPS] == pytest.approx(losses(one)[STEPS], abs=1e-5)


def test_one_life_of_a_run_killed_stopped_resumed_and_made_longer_has_the_curve_of_an_uninterrupted_one(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "disk"))
    whole, out = tmp_path / "whole", tmp_path / "train"

    def of(steps: int, **stream: Any) -> dict[str, Any]:
        often = {"checkpoint_every_steps": 10, "val_every_steps": 20, "schedule": "constant"}
        return options({"strategy": "ddp"}, train={"steps": steps} | often, stream=stream)

    assert train(corpus, whole, of(60), nproc=2).returncode == 0
    copied = {"stage_to": "$NODE_DISK"}
    process = start(corpus, out, of(50, **copied), nproc=2, max_restarts=1)
    wait_for_step(out, 12, process)
    worker(out, 1).kill()
    wait_for_step(out, 22, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(WITHIN_S) == 75
    log = out.with_suffix(".log").read_text()
    assert "starting all again from the last checkpoint, restart 1 of 1\n" in log
    assert re.search(r"copied \d of \d shards, ", log)
    step = json.loads((out / "state.json").read_text())["step"]
    assert 22 <= step < 50
    assert log.splitlines()[-1] == (
        f"cellmill train: stopped at step {step} of 50, saved; run the same command to resume"
    )
    done = train(corpus, out, of(50), nproc=2)
    assert done.returncode == 0, done.stderr
    assert f"going on from step {step}\n" in done.stdout
    again = train(corpus, out, of(50), nproc=2)
    assert (again.returncode, again.stdout) == (0, f"{out}: this run is already done\n")
    longer = train(corpus, out, of(60), nproc=2)
    assert longer.returncode == 0, longer.stderr
    assert f"{out}: going on from step 50 of 50, now 60: from here the learning rate" in longer.stdout
    assert losses(out) == losses(whole)
    assert tensors_of(out, 60) == tensors_of(whole, 60)
    assert list((tmp_path / "disk").iterdir()) == [], "a copy of the shards is left"
    assert none_left(out)


@pytest.mark.full
def test_a_run_that_copies_its_shards_to_the_node_has_the_same_curve_and_leaves_no_copy(
    corpus: str, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "disk"))
    limit_gb = 1.01e-9 * Path(corpus, "shards", "train-00000.h5ad").stat().st_size
    copied = options(train={"steps": STEPS}, stream={"stage_to": "$NODE_DISK", "stage_limit_gb": limit_gb})
    done = train(corpus, tmp_path / "train", copied)
    assert done.returncode == 0, done.stderr
    told = rf"copied 1 of \d shards, 0.00 GB, to {tmp_path / 'disk'} in \d+ s, as many as stream.stage_limit_gb allows"
    assert re.search(told, done.stdout)
    assert "warning" not in done.stderr
    assert losses(tmp_path / "train") == losses(one)
    assert list((tmp_path / "disk").iterdir()) == []
    identities = [json.loads((out / "run.json").read_text())["identity"] for out in (one, tmp_path / "train")]
    assert identities[0] == identities[1]


def test_a_run_stored_before_an_option_was_added_is_done_and_not_set_aside(
    corpus: str, one: Path, tmp_path: Path
) -> None:
    out = tmp_path / "train"
    shutil.copytree(one, out)
    checkpoint = max((out / "checkpoints").glob("step-*"))
    state = json.loads((checkpoint / "state.json").read_text())
    for section, key in (("train", "weight_decay"), ("train", "seed"), ("stream", "io_threads")):
        del state["options"][section][key]
        state["identity"].pop(f"{section}.{key}", None)
    rewrite_state(checkpoint, state)
    again = train(corpus, out, options(train={"steps": STEPS}))
    assert (again.returncode, again.stdout) == (0, f"{out}: this run is already done\n")
    other = train(corpus, out, options(train={"steps": STEPS, "weight_decay": 0.3}))
    assert other.returncode == 2
    assert "another configuration (train.weight_decay 0.1 -> 0.3); change it back" in other.stderr


def rewrite_state(checkpoint: Path, state: dict[str, Any]) -> None:
    """Replace a checkpoint's state.json, and update its manifest."""
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    size = (checkpoint / "state.json").stat().st_size
    manifest["files"]["state.json"] = {"bytes": size, "sha256": sha256_file(checkpoint / "state.json")}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.full
def test_a_run_killed_three_times_has_the_curve_of_an_uninterrupted_one(corpus: str, tmp_path: Path) -> None:
    # the victim is the command itself, then a worker, then the agent between them
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    opts = long_run(300)
    assert train(corpus, alone, opts).returncode == 0
    chance = random.Random(time.time_ns())
    reached = 0
    for victim in ("command", "worker", "agent"):
        process = start(corpus, killed, opts)
        reached += chance.randint(5, 40)
        wait_for_step(killed, reached, process)
        first = workers_of(killed)[0]
        pid = {"command": process.pid, "worker": first.pid, "agent": first.parent().pid}[victim]
        os.kill(pid, signal.SIGKILL)
        process.wait(WITHIN_S)
        assert none_left(killed), f"a worker lives on after its {victim} was killed"
        assert not (killed / "status.json").exists()
    done = train(corpus, killed, opts)
    assert done.returncode == 0, done.stderr
    assert losses(killed) == losses(alone)
    assert json.loads((killed / "status.json").read_text())["best_val_loss"] == pytest.approx(
        json.loads((alone / "status.json").read_text())["best_val_loss"], abs=0
    )


def kill_worker(out: Path, but: int = 0) -> int:
    """Kill a worker other than `but` as soon as there is one; return its pid."""
    give_up = time.monotonic() + WITHIN_S
    while not (found := [process.pid for process in workers_of(out) if process.pid != but]):
        assert time.monotonic() < give_up, f"no worker within {WITHIN_S} s"
        time.sleep(0.05)
    os.kill(found[0], signal.SIGKILL)
    return found[0]


@pytest.mark.full
def test_kill_9_of_a_worker_or_an_agent_restarts_from_the_last_checkpoint_with_the_same_curve(
    corpus: str, tmp_path: Path
) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    opts = options(train={"steps": 240, "checkpoint_every_steps": 10})
    assert train(corpus, alone, opts, nodes=2).returncode == 0
    process = start(corpus, killed, opts, nodes=2, max_restarts=2)
    wait_for_step(killed, 15, process)
    kill_worker(killed)
    wait_for_step(killed, 60, process)
    workers_of(killed)[0].parent().kill()
    assert process.wait(WITHIN_S) == 0
    log = killed.with_suffix(".log").read_text()
    assert "starting all again from the last checkpoint, restart 1 of 2\n" in log
    assert "a process was lost (its agent ended with signal 9): starting all again" in log
    assert len(re.findall(r"going on from step [1-9]\d*0\n", log)) == 2
    assert losses(killed) == losses(alone)
    assert none_left(killed)


@pytest.mark.full
def test_processes_lost_twice_from_the_same_step_are_not_restarted(corpus: str, tmp_path: Path) -> None:
    out = tmp_path / "train"
    opts = options(train={"steps": 2000, "checkpoint_every_steps": 10_000})
    process = start(corpus, out, opts, max_restarts=5)
    wait_for_step(out, 3, process)
    kill_worker(out, but=kill_worker(out))
    assert process.wait(WITHIN_S) == 2
    log = out.with_suffix(".log").read_text()
    assert "a process was lost again without a new checkpoint after step 0: not started again\n" in log
    assert log.count("starting all again") == 1
    assert none_left(out)


@pytest.mark.full
def test_after_losing_one_of_two_agents_the_other_continues_alone(corpus: str, tmp_path: Path) -> None:
    alone, out = tmp_path / "alone", tmp_path / "train"
    opts = options(train={"steps": 60, "checkpoint_every_steps": 10})
    assert train(corpus, alone, opts).returncode == 0
    process = start(corpus, out, opts, nodes=2)
    wait_for_step(out, 25, process)
    worker(out, 1).parent().kill()
    assert process.wait(WITHIN_S) == 2
    assert none_left(out)
    done = train(corpus, out, opts, nodes=1)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^going on from step [1-9]\d*0$", done.stdout, re.M)
    assert json.loads((out / "status.json").read_text())["world_size"] == 1
    for step, loss in losses(alone).items():
        assert losses(out)[step] == pytest.approx(loss, abs=1e-4)


PAIRS_OF_RANKS: list[dict[str, Any]] = [
    {"strategy": "ddp"},
    {"sharding_strategy": "FULL_SHARD"},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2},
]
SIGNALS = [(number, True, {}) for number in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")]
SIGNALS += [(number, False, layout) for number in ("SIGUSR2", "SIGTERM") for layout in PAIRS_OF_RANKS]


@pytest.mark.full
@pytest.mark.parametrize(("number", "to_command", "layout"), SIGNALS, ids=str)
def test_a_signal_to_the_command_or_one_process_saves_at_one_common_step_and_exits_75(
    corpus: str, tmp_path: Path, number: str, to_command: bool, layout: dict[str, Any]
) -> None:
    out = tmp_path / "train"
    opts = options(layout, train={"steps": 2000, "checkpoint_every_steps": 10_000, "val_every_steps": 10_000})
    process = start(corpus, out, opts, nproc=2, max_restarts=0 if to_command else 2)
    wait_for_step(out, 5, process)
    (process if to_command else worker(out, 1)).send_signal(signal.Signals[number])
    assert process.wait(WITHIN_S) == 75
    state = json.loads((out / "state.json").read_text())
    assert state["state"] == "stopped"
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{state['step']:08}"]
    log = out.with_suffix(".log").read_text()
    last = f"cellmill train: stopped at step {state['step']} of 2000, saved; run the same command to resume"
    assert log.splitlines()[-1] == last
    assert not [trouble for trouble in ("unwaited", "redistributing", "starting all again") if trouble in log], log
    assert none_left(out)


@pytest.mark.full
def test_a_rank_that_hangs_is_named_with_its_node_and_what_the_others_wait_in(corpus: str, tmp_path: Path) -> None:
    out = tmp_path / "train"
    opts = options(train={"steps": 2000, "checkpoint_every_steps": 10_000, "timeout_s": 20})
    process = start(corpus, out, opts, nproc=2)
    wait_for_step(out, 3, process)
    worker(out, 1).suspend()
    assert process.wait(WITHIN_S) == 2
    last = out.with_suffix(".log").read_text().splitlines()[-1]
    assert re.fullmatch(
        rf"cellmill train: rank 1 on {os.uname().nodename} does not respond; the other ranks have waited 20 s "
        r"\(train\.timeout_s\) at the [a-z ]+ of step \d+",
        last,
    )
    assert none_left(out)


@pytest.mark.full
def test_requested_gpus_that_torch_does_not_see_end_the_start_in_one_line(corpus: str, tmp_path: Path) -> None:
    without = {"CUDA_VISIBLE_DEVICES": "", "SLURMD_NODENAME": "node7"}
    flags = [*command(corpus, tmp_path / "train", options(train={"steps": 2}), nproc=2), "--gpus-per-node=2"]
    done = subprocess.run(flags, capture_output=True, text=True, timeout=580, env=os.environ | without)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        f"cellmill train: expected 2 GPUs per node, one per process, but node7 shows 0 GPUs (torch {torch.__version__} "
    )


@pytest.mark.full
def test_another_configuration_is_refused_until_a_restart_sets_the_earlier_training_aside_once(
    corpus: str, tmp_path: Path
) -> None:
    out, other = tmp_path / "train", options(train={"steps": 2, "lr": 5e-3})
    assert train(corpus, out, options(train={"steps": 2})).returncode == 0
    before = files_of(out)
    refused = train(corpus, out, other)
    assert (refused.returncode, refused.stderr) == (
        2,
        f"cellmill train: {out}: it holds a training of 2 steps with another configuration (train.lr 0.001 -> 0.005); "
        "change it back, or set that training aside and start afresh with `cellmill train --restart` (of a workflow: "
        f"`snakemake --config restart={tmp_path.name}`)\n",
    )
    assert files_of(out) == before
    restart = [*command(corpus, out, other), "--restart"]
    done = subprocess.run(restart, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    aside = out / "superseded-001"
    assert f"restart (train.lr 0.001 -> 0.005): the earlier training is now in {aside}\n" in done.stdout
    assert (aside / "checkpoints" / "step-00000002" / "manifest.json").exists()
    again = subprocess.run(restart, capture_output=True, text=True, timeout=WITHIN_S)
    assert (again.returncode, again.stdout.splitlines()[-1]) == (0, f"{out}: this run is already done")
    assert not (out / "superseded-002").exists()


def files_of(out: Path) -> dict[Path, int]:
    """Modification times of a run's files."""
    return {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.name != "lock"}


def tensors_of(out: Path, step: int) -> dict[str, str]:
    """Digests of the tensors of a checkpoint, by file."""
    manifest = json.loads((out / "checkpoints" / f"step-{step:08}" / "manifest.json").read_text())
    return {name: file["sha256"] for name, file in manifest["files"].items() if name.endswith(".distcp")}


def test_another_configuration_is_refused_and_nothing_is_touched(corpus: str, one: Path) -> None:
    before = files_of(one)
    refused = train(corpus, one, options(train={"steps": STEPS, "lr": 5e-3}))
    assert refused.returncode == 2
    assert "with another configuration (train.lr 0.001 -> 0.005); change it back, or set that" in refused.stderr
    assert files_of(one) == before


def test_other_shards_under_an_unfinished_training_are_refused_and_nothing_is_touched(
    corpus: str, one: Path, tmp_path: Path
) -> None:
    out = tmp_path / "train"
    shutil.copytree(one, out)
    checkpoint = next((out / "checkpoints").iterdir())
    saved = json.loads((checkpoint / "state.json").read_text())
    now = saved["fingerprint"]
    rewrite_state(checkpoint, saved | {"fingerprint": "0" * 64, "steps": 99})
    before = files_of(out)
    refused = train(corpus, out, options(train={"steps": STEPS}))
    assert refused.returncode == 2
    assert refused.stderr == (
        f"cellmill train: {out}: its checkpoints were trained on data 000000000000, the shards are now {now[:12]}; "
        "restore the shards, or train on the new ones with `cellmill train --restart`, which sets these aside\n"
    )
    assert files_of(out) == before


def test_a_loss_that_is_not_finite_stops_with_one_line(corpus: str, tmp_path: Path) -> None:
    out = tmp_path / "train"
    opts = options(train={"steps": 50, "lr": 1e38, "warmup_steps": 0, "clip_norm": None})
    done = train(corpus, out, opts, max_restarts=2)
    assert done.returncode == 2
    assert "starting all again" not in done.stdout
    cell = r"sim:\S+ \(train-\S+\.h5ad row \d+\)"
    assert re.fullmatch(
        r"cellmill train: loss (nan|inf) and gradient norm (nan|inf) at step \d+, the last of 5 bad steps in a row "
        r"\(train\.max_bad_steps 5\): lower train\.lr \(1e\+38\) or raise train\.warmup_steps; earlier checkpoints are "
        rf"intact; rank 0 had {cell}, {cell}, {cell}, {cell} and 12 more cells \(see the log\)",
        done.stderr.splitlines()[-1],
    ), done.stderr
    assert len(re.findall(cell, done.stdout)) == 16
    assert none_left(out)


@pytest.mark.full
def test_a_process_that_runs_out_of_memory_reports_its_plan(corpus: str, tmp_path: Path) -> None:
    # two matrices of over 160 GB, with a limit of 32 GB a process
    opts = options(model={"hidden": 200_000, "layers": 1}, train={"steps": 2})
    limit = 32 << 30
    done = subprocess.run(
        command(corpus, tmp_path / "train", opts, max_restarts=2),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 2
    assert re.fullmatch(
        rf"cellmill train: rank 0 on {os.uname().nodename}: out of memory \(.*allocate.*\); the plan was [\d.]+ TB "
        r"per process, most of it optimizer \(optimizer [\d.]+ TB, .*parameters [\d.]+ TB, .*\): (use|set) .+ "
        r"\(the profile\).*",
        done.stderr.splitlines()[-1],
    ), done.stderr
    assert "starting all again" not in done.stdout
    assert none_left(tmp_path / "train")


def test_a_layout_that_does_not_fit_is_refused_before_any_process_starts(corpus: str, tmp_path: Path) -> None:
    done = train(corpus, tmp_path / "train", options({"shard_size": 3}), nproc=4)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "shard_size" in done.stderr
    assert not (tmp_path / "train" / "run.json").exists()


def test_a_damaged_shard_is_named_before_training(corpus: str, tmp_path: Path) -> None:
    copy = tmp_path / "corpus"
    shutil.copytree(corpus, copy, ignore=shutil.ignore_patterns("verified.json"))
    shard = next((copy / "shards").glob("train*.h5ad"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    done = train(str(copy), tmp_path / "train", options(train={"steps": 2}))
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        rf"cellmill train: {shard}: expected sha256 \w{{12}} as in the manifest, got \w{{12}}: .+", last
    )
    assert not (copy / "shards" / "verified.json").exists()
    assert not (tmp_path / "train" / "checkpoints").exists()


@pytest.fixture(scope="module")
def model(corpus: str, one: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the run `one`."""
    out = tmp_path_factory.mktemp("model")
    exported = ["consolidate", "--options", '{"consolidate": {}}', "--train", str(one), "--out", str(out)]
    assert main([*exported, "--vocabulary", f"{corpus}/vocabulary.tsv"]) == 0
    return out


def test_starting_from_another_architecture_is_refused(corpus: str, model: Path, tmp_path: Path) -> None:
    words = [*command(corpus, tmp_path / "other", options(model={"heads": 2}, train={"steps": 2})), "--init-from"]
    refused = subprocess.run([*words, str(model)], capture_output=True, text=True)
    assert (refused.returncode, refused.stderr) == (
        2,
        f"cellmill train: model.heads is 2, the model to start from ({model}) has 4; make them equal\n",
    )


@pytest.mark.full
def test_a_run_starts_from_the_weights_of_a_model(corpus: str, one: Path, model: Path, tmp_path: Path) -> None:
    words = [*command(corpus, tmp_path / "train", options(train={"steps": 2})), "--init-from", str(model)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "train")[1] < 0.9 * losses(one)[1], "the first loss is that of fresh weights"


@pytest.mark.full
def test_shards_that_change_between_two_starts_are_found(corpus: str, tmp_path: Path) -> None:
    copy, out = tmp_path / "corpus", tmp_path / "train"
    shutil.copytree(corpus, copy, ignore=shutil.ignore_patterns("verified.json"))
    opts = options(train={"steps": 4, "checkpoint_every_steps": 2})
    assert train(str(copy), out, opts).returncode == 0
    assert (copy / "shards" / "verified.json").exists(), "other runs of this corpus would hash it again"
    (out / "status.json").unlink()
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    shard = next((copy / "shards").glob("train*.h5ad"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    done = train(str(copy), out, opts)
    assert done.returncode == 2
    assert f"{shard}: expected sha256" in done.stderr


def test_a_vocabulary_of_other_shards_is_refused(corpus: str, tmp_path: Path) -> None:
    copy = tmp_path / "corpus"
    shutil.copytree(corpus, copy)
    lines = (copy / "vocabulary.tsv").read_text().splitlines(keepends=True)
    (copy / "vocabulary.tsv").write_text("".join(lines[:-1]))
    done = train(str(copy), tmp_path / "train", options(train={"steps": 2}))
    assert done.returncode == 2
    assert re.fullmatch(
        rf"cellmill train: {copy}/vocabulary.tsv: its digest is \w{{12}}, the shards were made with \w{{12}}; .+\n",
        done.stderr,
    )
