"""Stages in SLURM's queue: whose they are, and why they wait."""

import subprocess
import sys
from pathlib import Path

import pytest

from cellmill.launch.queue import QueuedJob, StageWatch, stage_jobs, waiting_lines
from cellmill.runs.jobs import JobState
from tests.unit.test_status import results, run_of, squeue, status

__all__ = ["results"]


def test_status_names_the_stages_of_this_workflow_that_wait(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, elsewhere = results.parent, results
    (here / ".snakemake").mkdir()
    run_of(results, "one")
    squeue(
        results,
        f"7|PENDING|PartitionTimeLimit|1:30:00|1|rule_embed_wildcards_one_sim|{here}",
        f"8|PENDING|PartitionTimeLimit|1:30:00|1|rule_embed_wildcards_two_sim|{here}",
        f"9|PENDING|Priority|30:00|1|rule_vocabulary|{here}",
        f"10|RUNNING|None|30:00|1|rule_shard_wildcards_sim|{here}",
        f"11|PENDING|Priority|30:00|1|rule_shard_wildcards_sim|{elsewhere}",
        f"12|PENDING|Resources|30:00|2|(null)|{here}",
    )
    assert status(results, capsys).splitlines()[2:] == [
        "stage embed: 2 jobs (7, 8): PENDING (PartitionTimeLimit): limit 1:30:00 is more than the partition allows: "
        "lower it in the profile",
        "stage vocabulary: job 9: PENDING (Priority)",
    ]
    assert [job.name for job in stage_jobs(here)] == ["embed", "embed", "vocabulary", "shard"]


def test_a_reason_is_told_once_and_again_when_it_comes_back(tmp_path: Path) -> None:
    said: list[str] = []
    watch = StageWatch(tmp_path, said.append)

    def jobs(*waiting: tuple[str, str]) -> list[QueuedJob]:
        return [QueuedJob(job_id, JobState("PENDING", why), "embed", "30:00", "1") for job_id, why in waiting]

    watch.look(jobs(("7", "Priority")))
    assert said == [], "a job that has just been submitted"
    watch.look(jobs(("7", "Priority"), ("8", "Priority")))
    assert said == ["stage embed: job 7: PENDING (Priority)"]
    watch.look(jobs(("7", "Priority"), ("8", "Priority")))
    watch.look(jobs(("7", "Priority"), ("8", "AssocGrpGRES")))
    assert said[1:] == ["stage embed: job 8: PENDING (AssocGrpGRES)"]
    watch.look([])
    watch.look(jobs(("9", "Priority")))
    watch.look(jobs(("9", "Priority")))
    assert said[2:] == ["stage embed: job 9: PENDING (Priority)"]
    many = jobs(*((str(number), "Resources") for number in range(20, 29)))
    assert waiting_lines(many) == ["stage embed: 9 jobs (20, 21, 22, 23, 24, …): PENDING (Resources)"]


SNAKEFILE = """
from cellmill.launch.queue import reasons_of_failed

rule all:
    input: "a.txt", "b.txt"

rule a:
    output: "a.txt"
    log: "logs/a b.log"
    shell: "(echo cellmill train: first; echo 'cellmill train: why'; echo x; exit 2) 2>&1 | tee {log:q}"

rule b:
    output: "b.txt"
    shell: "touch {output}"

onerror:
    print(*reasons_of_failed(log), sep="\\n", file=sys.stderr)
"""


def test_the_reason_of_a_failed_job_is_repeated_below_snakemake_s_own_block(tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(f"import sys\n{SNAKEFILE}")
    words = [sys.executable, "-m", "snakemake", "--cores", "1"]
    done = subprocess.run(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.splitlines()
    below = lines[max(number for number, line in enumerate(lines) if "CalledProcessError" in line) :]
    assert [line for line in below if line.startswith("cellmill ")] == ["cellmill train: why"]
    assert lines[-1] == "At least one job did not complete successfully."
