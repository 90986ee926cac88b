"""Sites with several clusters, by a scripted SLURM: every call about a job goes to its cluster."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from cellmill.cli import main
from cellmill.launch.queue import Queue, living_jobs
from cellmill.launch.slurm import SlurmLauncher
from cellmill.runs.jobs import Jobs
from tests.unit.slurm_site import command, scontrol
from tests.unit.test_profiles_new import SITE
from tests.unit.test_slurm_launcher import NONE, Answer, Scripted, done, listed, scripted

__all__ = ["done", "scripted"]

ON_NORTH: Answer = [0, "Submitted batch job 7 on cluster north\n", ""]


def options(call: str) -> list[str]:
    return call.split()[1:3]


def test_calls_after_a_submission_name_its_cluster(done: Scripted) -> None:
    done.run(listed("RUNNING"), NONE, NONE, listed("COMPLETED"), sbatch=[ON_NORTH])
    before, *after = done.calls("squeue")
    assert "-M" not in before
    assert [options(call) for call in after[1:]] == [["-M", "north"]] * len(after[1:])
    assert [options(call) for call in done.calls("sacct")] == [["-M", "north"]]
    assert Jobs(done.train).newest().cluster == "north"


def test_the_cluster_of_the_profile_is_named_to_sbatch(
    done: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "south")
    done.hook("sbatch", "open(folder / 'environment', 'w').write(str(sorted(os.environ)))")
    done.machine = done.machine.model_copy(update={"slurm_cluster": "north"})
    done.run(listed("COMPLETED"), sbatch=[ON_NORTH])
    assert "#SBATCH --clusters=north\n" in (done.fake / "script.sh").read_text()
    assert "SLURM_CLUSTERS" not in (done.fake / "environment").read_text()
    assert all(options(call) == ["-M", "north"] for call in done.calls("squeue"))


def test_a_lost_submission_is_found_on_its_cluster(done: Scripted) -> None:
    done.machine = done.machine.model_copy(update={"slurm_cluster": "north,south"})
    lost = [1, "", "sbatch: error: Batch job submission failed: Socket timed out\n"]
    found = [0, "CLUSTER: north\nCLUSTER: south\n7|RUNNING|None|node1|{name}\n", ""]
    printed = done.run(found, listed("COMPLETED"), sbatch=[lost])
    assert "job 7 was submitted but not recorded: adopted by its name\n" in printed
    assert Jobs(done.train).newest().cluster == "south"
    assert options(done.calls("squeue")[-1]) == ["-M", "south"]


def test_a_later_launcher_asks_the_cluster_of_the_record(done: Scripted) -> None:
    done.answers(squeue=[listed("RUNNING")])
    folder, name = Jobs(done.train).new()
    (done.fake / "name").write_text(name)
    launcher = done.launcher()
    record = SlurmLauncher.living(launcher)
    assert record is not None
    assert record.job_id == "7"
    dataclasses.replace(record, cluster="north").write()
    launcher.living()
    assert options(done.calls("squeue")[-1]) == ["-M", "north"]
    [job] = living_jobs(Jobs(done.train), Queue(1.0))
    assert job.argument == "-M north 7"
    assert folder == Jobs(done.train).newest().path


def test_a_held_job_names_its_cluster_in_the_remedy(done: Scripted) -> None:
    held = listed("PENDING", "JobHeldUser")
    printed = done.run(held, held, listed("COMPLETED"), sbatch=[ON_NORTH])
    assert "`scontrol release -M north 7` releases it\n" in printed


def test_profiles_new_asks_and_names_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    answers = {f"-M north -a -o {what}": text for what, text in scontrol(SITE).items()}
    answers["-M north show config"] = scontrol(SITE)["show config"]
    command(tmp_path / "bin" / "scontrol", answers)
    assert main(["profiles", "new", "mine", "--cluster", "north"]) == 0
    tree = yaml.safe_load(Path("profiles/mine/config.yaml").read_text())
    assert tree["default-resources"]["slurm_cluster"] == "north"
    assert tree["set-resources"]["train"]["slurm_cluster"] == "north"
