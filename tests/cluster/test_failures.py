"""Every failure of a job ends the launcher with one line: the error, its log, what to change. The
runs fail at the same time, as those of one workflow do.
"""

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.launched import Launched, on_slurm, run_options
from tests.cluster.rig import Rig

ENDED = r" \(job \d+, log: {train}/jobs/001/\d+_0_log.out\)"


def one_node(partition: str, **changes: Any) -> dict[str, Any]:
    return on_slurm(
        nodes=1,
        slurm_partition=partition,
        gpus_per_node="",
        cpus_per_task=2,
        **{"mem_mb": 1500, **changes},
    )


@pytest.fixture(scope="module")
def failed(
    rig: Rig, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Launched]]:
    """A run of each kind, ended."""
    folder = tmp_path_factory.mktemp("failed")
    raising = {
        "PYTHONPATH": str(Path(__file__).parent / "raising"),
        "RAISE_WHEN_THERE": str(folder / "raises" / "train" / "metrics.jsonl"),
    }
    runs = {
        "raises": start(corpus, folder / "raises", rig, raising, one_node("gpu-a100")),
        "nan": start(
            corpus,
            folder / "nan",
            rig,
            {},
            one_node("gpu-h100"),
            lr=1e38,
            warmup_steps=0,
            clip_norm=None,
        ),
        "refused": start(corpus, folder / "refused", rig, {}, one_node("no-such-partition")),
        "never": start(corpus, folder / "never", rig, {}, one_node("gpu-h100", runtime=600)),
    }
    runs["full"] = start(
        corpus, rig.small / "full", rig, {}, one_node("gpu-a100"), checkpoint_every_steps=1
    )
    if rig.cgroups:
        runs["memory"] = start(corpus, folder / "memory", rig, {}, one_node("gpu-a100", mem_mb=200))
    yield runs
    for run in runs.values():
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGINT)
            run.process.wait(300)


def start(
    corpus: str, folder: Path, rig: Rig, more: dict[str, str], machine: dict[str, Any], **train: Any
) -> Launched:
    log = Path(corpus) / f"{folder.name}.log"  # not in the run's folder, which may be full
    return Launched.start(
        corpus,
        folder / "train",
        run_options(300, **train),
        rig.environment | more,
        log=log,
        **machine,
    )


def last_line(run: Launched) -> str:
    assert run.end() == 2, run.printed
    assert len(run.job_ids()) <= 1, "an error was tried again"
    return run.last_line


def ends(run: Launched, pattern: str) -> None:
    where = ENDED.format(train=re.escape(str(run.train)))
    assert re.fullmatch(f"cellmill train: {pattern}{where}", last_line(run)), run.printed


def test_a_rank_that_raises_is_named_with_its_node(failed: dict[str, Launched]) -> None:
    raises = failed["raises"]
    ends(
        raises,
        r"rank 1 on node1: ValueError: planted bug; its traceback is in node-0.log beside the job's log",
    )
    assert "Traceback" not in raises.printed, "what followed in the other ranks would hide the line"
    assert (
        'raise ValueError("planted\\nbug")'
        in (raises.train / "jobs" / "001" / "node-0.log").read_text()
    )


def test_a_loss_that_is_not_finite_ends_the_run(failed: dict[str, Launched]) -> None:
    ends(
        failed["nan"],
        r"loss (nan|inf|-inf) and gradient norm (nan|inf|\S+) at step \d+, the last of 5 bad steps in a row "
        r"\(train.max_bad_steps 5\): lower train.lr \(1e\+38\) or raise train.warmup_steps; earlier checkpoints are "
        r"intact; rank 0 had .*",
    )


def test_a_job_killed_for_memory_names_the_key_to_change(failed: dict[str, Launched]) -> None:
    if "memory" not in failed:
        pytest.skip("memory limits need a writable cgroup v1")
    # the kernel chooses: it may kill the task that watches the processes, too, and then SLURM's own
    # word is left
    ends(
        failed["memory"],
        r"(node\d: a process was killed because the job used up its memory on this node;|the job ran out of memory:) "
        "raise set-resources: train: mem_mb in the profile, or lower train.token_budget",
    )


def test_a_full_shared_folder_is_named(failed: dict[str, Launched]) -> None:
    line = last_line(failed["full"])
    assert str(failed["full"].train) in line
    # what is written first when the disk is full is a matter of chance; torch's writer keeps no
    # reason
    cut_off = r"the checkpoint of step \d+ could not be written \(a file was cut off: the disk is full, or a quota"
    assert re.search(f"[Nn]o space left|{cut_off}", line), failed["full"].printed


def test_a_refusal_by_sbatch_is_repeated_word_for_word(
    failed: dict[str, Launched],
) -> None:
    run = failed["refused"]
    assert last_line(run) == (
        "cellmill train: sbatch refused the job: invalid partition specified: no-such-partition Batch job submission "
        "failed: Invalid partition name specified; the request is in the profile, set-resources: train"
    )
    assert list((run.train / "jobs").iterdir()) == []


def test_a_waiting_job_says_why_it_can_never_start(failed: dict[str, Launched]) -> None:
    run = failed["never"]
    run.wait_for_print("PENDING (PartitionTimeLimit)")
    assert re.search(
        r"^job \d+: PENDING \(PartitionTimeLimit\): runtime 600 min is more than the partition allows: lower it in the "
        "profile$",
        run.printed,
        re.M,
    )
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 75
