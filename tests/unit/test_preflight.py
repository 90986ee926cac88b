"""Exact lines of preflight, with real processes and with scripted SLURM commands."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from platform import python_version
from typing import Any

import pytest
import yaml

from cellmill import __version__
from cellmill.cli import main
from cellmill.config import check_options
from cellmill.config.machine import Machine
from cellmill.data.genes.tables import gene_table
from cellmill.launch.submit import End
from cellmill.preflight.node_probe import find_bus_rate, find_busiest
from cellmill.preflight.nodes import judge_allreduce, judge_end, judge_nodes
from cellmill.runs.lock import locked
from tests.distributed.command import pids_with, wait_for
from tests.unit.slurm_site import command, scontrol

CONFIG = """
corpora: {sim: {table: datasets.tsv}}
preprocess: {min_genes: 5}
tokens: {max_tokens: 32}
stream: {lanes: 48}
model: {hidden: 16, layers: 1, heads: 2}
train: {steps: 4, global_batch: 48, token_budget: 2048}
runs: {tiny: {corpus: sim, parallel: {strategy: ddp}}, wide: {corpus: sim}}
"""
SITE = """
n1|IDLE|32|250000|gpu:a100:4(S:0-1),nvme:1|a100,ib|gpu|UP|2-00:00:00
n2|MIXED|32|250000|gpu:a100:4(S:0-1),nvme:1|a100,ib|gpu|UP|2-00:00:00
n3|ALLOCATED|16|120000|gpu:a100:2|a100|gpu|UP|2-00:00:00
n4|IDLE+NOT_RESPONDING|32|250000|gpu:a100:4|a100,ib|gpu|UP|2-00:00:00
n5|IDLE*|32|250000|gpu:a100:4|a100,ib|gpu|UP|2-00:00:00
c1|IDLE+POWERED_DOWN|8|16000|(null)|(null)|cpu*|UP|UNLIMITED
c2|DOWN|8|16000|(null)|(null)|cpu*|UP|UNLIMITED
c1|IDLE+POWERED_DOWN|8|16000|(null)|(null)|short|UP|30:00
h1|IDLE|64|500000|gpu:8|h100|new|INACTIVE|1:00:00
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated: Path) -> Path:
    """The working folder, with a configuration of two runs on simulated cells."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "datasets.tsv").write_text(f"dataset\tpath\nsim\t{simulated}\n")
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


Commands = Callable[..., None]
Preflight = Callable[..., tuple[int, list[str], str]]  # exit code, lines, and the error


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """A function that puts SLURM commands, and no other program, on PATH: each prints its text, or
    fails with it.
    """
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    def add(site: str = SITE, **answers: str | tuple[str, int]) -> None:
        for name, answer in answers.items():
            text, code = answer if isinstance(answer, tuple) else (answer, 0)
            texts = {"": text}
            if name == "scontrol" and not text:
                texts = scontrol(site)
            if name == "sacctmgr" and not code:
                texts = {"DefaultAccount": "", "MaxWall": "short|00:05:00"} | texts
            # sbatch --test-only prints to stderr, also without an error
            command(folder / name, texts, code, to_stderr=name == "sbatch")

    said = "sbatch: Job 7 to start at 2031-02-03T04:05:06 using 4 processors on nodes n[1-2] in partition gpu"
    # which: Snakemake looks for a shell by it when a process evaluates its first expression
    empty = dict.fromkeys(("scontrol", "srun", "squeue", "scancel", "sacct", "which"), "")
    add(**empty, sbatch=said, sacctmgr="lab||normal,long\nlab2||short")
    return add


def write_profile(name: str = "one", plan: dict[str, Any] | None = None, **train: Any) -> str:
    """Write a profile; return its folder."""
    tree = {"set-resources": {"plan": plan or {}, "train": train}}
    path = Path("profiles") / name / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tree))
    return str(path.parent)


def slurm(**changes: Any) -> dict[str, Any]:
    """A machine that the fake cluster has."""
    machine = {"launcher": "slurm", "nodes": 2, "nproc_per_node": 4, "runtime": 600}
    return machine | {"slurm_partition": "gpu", "gpus_per_node": "a100:4"} | changes


def write_slurm(**changes: Any) -> str:
    """Write a profile of such a machine; return its folder."""
    return write_profile(plan={"device": "a100"}, **slurm(**changes))


@pytest.fixture
def preflight(project: Path, capsys: pytest.CaptureFixture[str]) -> Preflight:
    def run(profile: str, *more: str) -> tuple[int, list[str], str]:
        code = main(["preflight", "--profile", profile, "--config", "config.yaml", *more])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.rstrip("\n")

    return run


def run_here(*words: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cellmill.cli", "preflight", "--config", "config.yaml", *words]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        start_new_session=True,
    )


def test_processes_that_cannot_connect_report_their_error(project: Path) -> None:
    process = run_here("--profile", write_profile(nproc_per_node=2), GLOO_SOCKET_IFNAME="nope0")
    printed, complaints = process.communicate(timeout=500)
    assert process.returncode == 2, printed + complaints
    if "by nccl" in printed:
        pytest.skip("this machine has GPUs, and NCCL does not read the variable")
    said = [line for line in printed.splitlines() if line.startswith("no ")]
    assert len(said) == 1, printed
    assert re.fullmatch(
        rf"no  job: rank [01] on {os.uname().nodename}: RuntimeError: .*nope0.*",
        said[0],
    )
    assert complaints.splitlines()[-1] == "cellmill preflight: no go: 1 reason"


@pytest.mark.parametrize("given", ["profiles/local", "local"])
def test_the_local_profile_of_a_checkout_is_go(root: Path, project: Path, given: str) -> None:
    shutil.copytree(root / "profiles", "profiles")
    process = run_here("--profile", given)
    printed, complaints = process.communicate(timeout=500)
    assert (process.returncode, printed.splitlines()[-1:], complaints) == (0, ["go"], ""), printed
    assert "ok  job: its processes ran" in printed.splitlines()


LARGE_SITE = """
a1|IDLE|64|512000|gpu:a100:4|a100|gpu-a100|UP|2-00:00:00
a2|IDLE|64|512000|gpu:a100:4|a100|gpu-a100|UP|2-00:00:00
h1|IDLE|96|1000000|gpu:h100:8|h100|gpu-h100|UP|2-00:00:00
c1|IDLE|64|256000|gpu:a100:1|(null)|cpu*|UP|UNLIMITED
"""


@pytest.mark.parametrize("name", ["slurm", "slurm-a100", "slurm-h100"])
def test_a_shipped_profile_is_go_on_a_matching_site(
    root: Path, preflight: Preflight, commands: Commands, name: str
) -> None:
    shutil.copytree(root / "profiles", "profiles")
    commands(site=LARGE_SITE, scontrol="")
    code, lines, last = preflight(f"profiles/{name}", "--no-job")
    assert [line for line in lines if line.startswith("no")] == []
    assert (code, lines[-1], last) == (0, "go", "")


def test_an_interrupt_ends_every_process(project: Path) -> None:
    process = run_here("--profile", write_profile(nproc_per_node=2))
    head = Path("results/preflight/one/jobs/001/head.json")
    wait_for(head.exists)
    time.sleep(0.5)  # its agents are being started
    process.send_signal(signal.SIGINT)
    printed, complaints = process.communicate(timeout=500)
    assert process.returncode == 130, printed + complaints
    assert complaints.splitlines()[-1] == "cellmill preflight: interrupted"
    wait_for(lambda: not pids_with("cellmill.preflight.node_probe", str(project)))


def test_one_preflight_of_a_profile_at_a_time(preflight: Preflight) -> None:
    profile = write_profile(nproc_per_node=1)
    folder = Path("results/preflight/one")
    folder.mkdir(parents=True)
    with locked(folder, "busy"):
        code, lines, last = preflight(profile)
    cores = len(os.sched_getaffinity(0))
    assert f"ok  launcher: local: 1 processes on this machine's {cores} cores" in lines
    line = next(line for line in lines if line.startswith("no  job: "))
    busy = rf"another preflight of this profile is running \(process {os.getpid()} of .+\)"
    assert re.fullmatch(rf"no  job: results/preflight/one: {busy}", line)
    assert (code, last) == (2, "cellmill preflight: no go: 1 reason")


def test_a_cluster_that_meets_every_request_is_go(preflight: Preflight, commands: Commands) -> None:
    profile = write_slurm(
        mem_mb=200_000, cpus_per_task=32, constraint="a100&ib", slurm_account="lab", qos="long"
    )
    code, lines, last = preflight(profile, "--no-job")
    assert lines == [
        "ok  profile: profiles/one/config.yaml: launcher slurm, 2 x 4 processes",
        "ok  commands: sbatch, srun, squeue, scancel",
        "ok  accounting: sacct answers",
        "ok  partition: gpu is up",
        "ok  time limit: partition gpu (scontrol) allows 2880 min, requested: 600",
        "ok  nodes: 3 of the 5 nodes of gpu are up, requested: 2",
        "ok  GPUs: nodes of gpu have 2 x a100 and 4 x a100, requested: 4 x a100 on each of 2: 2 have enough",
        "ok  start: SLURM expects 2031-02-03 04:05:06 on n[1-2]",
        "ok  run tiny: fits 8 processes: 8 replicas, cells not counted yet",
        "ok  run wide: fits 8 processes: 2 replicas of 4 shards, cells not counted yet",
        "ok  genes of sim: 400 of 400 (100.0%) have a human Ensembl id",
        "?   job: not tried (--no-job): the nodes were not checked",
        "go",
    ]
    assert (code, last) == (0, "")
    record = json.loads(Path("results/preflight/one.json").read_text())
    assert (record["go"], record["machine"]["constraint"]) == (True, "a100&ib")


KEYS = "set-resources: train:"
KNOWN = f"{KEYS} slurm_partition: one of cpu, gpu, new, short"
GPUS = "no  GPUs: nodes of gpu have 2 x a100 and 4 x a100, requested:"
OTHER = "or another slurm_partition"
REFUSED = "no  start: sbatch refuses gpu, 2 nodes, 600 min, 8 CPUs, GPUs a100:4"
UNAVAILABLE = "allocation failure: Requested node configuration is not available"
INVALID_ACCOUNT = "Invalid account or account/partition combination specified"
AGAIN = "try again when SLURM's controller answers"
NO_CONTACT = "Unable to contact slurm controller"
CPU = {"slurm_partition": "cpu", "nodes": 1}


@pytest.mark.parametrize(
    ("changes", "answers", "line"),
    [
        ({"slurm_partition": "gpu,gpus"}, {}, f"no  partition: there is no 'gpus'; {KNOWN}"),
        ({"slurm_partition": ""}, {"site": SITE.replace("cpu*", "cpu"), "scontrol": ""},
         f"no  partition: there is no default partition; {KNOWN}"),
        ({"slurm_partition": "new"}, {}, f"no  partition: new is inactive; {KEYS} slurm_partition: another"),
        (CPU | {"slurm_partition": "", "gpus_per_node": ""}, {}, "ok  partition: cpu is up"),
        # one that fits is enough
        (CPU | {"slurm_partition": "short,cpu", "gpus_per_node": ""}, {},
         "ok  time limit: partition cpu (scontrol) allows any time, requested: 600"),
        ({"runtime": "3d"}, {},
         f"no  time limit: partition gpu (scontrol) allows 2880 min, requested: 4320; {KEYS} runtime: 2880"),
        ({"qos": "short"}, {}, f"no  time limit: QOS short (sacctmgr) allows 5 min, requested: 600; {KEYS} runtime: 5"),
        ({"nodes": 4}, {}, f"no  nodes: 3 of the 5 nodes of gpu are up, requested: 4; {KEYS} nodes: 3, {OTHER}"),
        ({"nodes": 3}, {}, f"{GPUS} 4 x a100 on each of 3: 2 have enough; {KEYS} gpus_per_node, {OTHER}"),
        ({"gpus_per_node": "h100:4"}, {},
         f"{GPUS} 4 x h100 on each of 2: 0 have enough; {KEYS} gpus_per_node, {OTHER}"),
        ({"gpus_per_node": "", "gres": "gpu:a100:8,nvme:1", "nproc_per_node": 1}, {},
         f"{GPUS} 8 x a100 on each of 2: 0 have enough; {KEYS} gres, {OTHER}"),
        (CPU, {},
         f"no  GPUs: cpu has none, requested: 4 x a100 on each of 1: 0 have enough; {KEYS} gpus_per_node, {OTHER}, "
         "or no GPUs and device: cpu"),
        ({"gpus_per_node": ""}, {}, "?   GPUs: nodes of gpu have 2 x a100 and 4 x a100, but none is requested; "
         f"{KEYS} gpus_per_node: a100:4, if the runs are to use them"),
        ({"nproc_per_node": 2}, {},
         f"?   processes: 2 on each node leave 2 of 4 GPUs idle; {KEYS} nproc_per_node: 4"),
        # sbatch's refusal, with the values that it would accept
        ({"mem_mb": 300_000, "constraint": "ib"}, {"sbatch": (UNAVAILABLE, 1)},
         f"{REFUSED.replace('8 CPUs', '300000 MB, 8 CPUs')}, ib: {UNAVAILABLE}; {KEYS} mem_mb: 250000 at most, "
         "cpus_per_task: 32 at most, constraint: of a100, ib"),
        ({"mem_mb_per_gpu": 90_000}, {"sbatch": (UNAVAILABLE, 1)},
         f"{REFUSED.replace('8 CPUs', '90000 MB per gpu, 8 CPUs')}: {UNAVAILABLE}; {KEYS} mem_mb_per_gpu: 62500 at "
         "most, cpus_per_task: 32 at most"),
        ({"mem_mb_per_cpu": 40_000}, {"sbatch": (UNAVAILABLE, 1)},
         f"{REFUSED.replace('8 CPUs', '40000 MB per cpu, 8 CPUs')}: {UNAVAILABLE}; {KEYS} mem_mb_per_cpu: 31250 at "
         "most, cpus_per_task: 32 at most"),
        ({"constraint": "nvlink"}, {"sbatch": ("sbatch: error: Invalid feature specification", 1)},
         f"{REFUSED}, nvlink: Invalid feature specification; {KEYS} constraint: one of a100, ib"),
        ({"qos": "gold", "slurm_account": "lab"}, {"sbatch": ("allocation failure: Invalid qos specification", 1)},
         f"{REFUSED}: allocation failure: Invalid qos specification; {KEYS} qos: one of long, normal"),
        ({"slurm_account": "lba"}, {"sbatch": (INVALID_ACCOUNT, 1)},
         f"{REFUSED}: {INVALID_ACCOUNT}; {KEYS} slurm_account: one of lab, lab2"),
        ({"reservation": "x"}, {"sbatch": ("Requested reservation is invalid", 1)},
         f"{REFUSED}: Requested reservation is invalid; {KEYS} reservation"),
        ({}, {"sbatch": ("sbatch: error: --mem is not allowed here, use --mem-per-cpu", 1)},
         f"{REFUSED}: --mem is not allowed here, use --mem-per-cpu; {KEYS} mem_mb_per_cpu or mem_mb_per_gpu instead of "
         "mem_mb"),
        ({"mem_mb_per_cpu": 9}, {"sbatch": ("sbatch: error: --mem-per-cpu is not allowed here", 1)},
         f"{REFUSED.replace('8 CPUs', '9 MB per cpu, 8 CPUs')}: --mem-per-cpu is not allowed here; {KEYS} mem_mb or "
         "mem_mb_per_gpu instead of mem_mb_per_cpu"),
        ({}, {"sbatch": ("sbatch: error: No", 1)}, f"{REFUSED}: No; change set-resources: train"),
        # an unusable answer is a doubt
        ({}, {"sbatch": (f"sbatch: error: Batch job submission failed: {NO_CONTACT}", 1)},
         f"?   start: no estimate: sbatch --test-only: error: Batch job submission failed: {NO_CONTACT}"),
        ({}, {"scontrol": (NO_CONTACT, 1)}, f"?   SLURM: unknown: scontrol: {NO_CONTACT}; {AGAIN}"),
        ({}, {"scontrol": "Hello"}, f"?   SLURM: unknown: scontrol answered 'Hello'; {AGAIN}"),
        ({}, {"scontrol": "PartitionName=gpu NodeName=n1 MaxTime=soon"},
         f"?   SLURM: unknown: SLURM: expected a time limit, got 'soon'; {AGAIN}"),
        ({}, {"sacct": ("storage is disabled", 1), "sacctmgr": ("sacctmgr: no", 1)},
         "?   accounting: none (sacct: storage is disabled): the cost of a run is computed from its own files"),
    ],
    ids=str,
)  # fmt: skip
def test_what_slurm_cannot_run_is_named_with_its_key(
    preflight: Preflight,
    commands: Commands,
    changes: dict[str, Any],
    answers: dict[str, Any],
    line: str,
) -> None:
    commands(**answers)
    code, printed, last = preflight(write_slurm(**changes), "--no-job")
    assert line in printed, "\n".join(printed)
    refusals = [each for each in printed if each.startswith("no ")]
    assert refusals == [line] * line.startswith("no ")
    assert (code, last) == ((2, "cellmill preflight: no go: 1 reason") if refusals else (0, ""))


def test_missing_commands_are_named(
    preflight: Preflight, project: Path, commands: Commands
) -> None:
    for name in ("sbatch", "scancel"):
        (project / "bin" / name).unlink()
    code, lines, last = preflight(write_slurm(nodes="'2-3'", nproc_per_node=3, gpus_per_node=""))
    misfit = (
        "stream.lanes 48 is not a multiple of 6 and of 9, the numbers of data-parallel processes on 2 to 3 nodes; set "
        "stream.lanes 18 with train.global_batch 54; set-resources: train: nodes, nproc_per_node"
    )
    assert lines == [
        "ok  profile: profiles/one/config.yaml: launcher slurm, 2-3 x 3 processes",
        "no  commands: sbatch, scancel are not on PATH; run this on a login node of the cluster, or set-resources: "
        "train: launcher: local or allocation",
        f"no  run tiny: {misfit}",
        f"no  run wide: {misfit}",
        "ok  genes of sim: 400 of 400 (100.0%) have a human Ensembl id",
        "?   job: not tried: the profile has to change first",
    ]
    assert (code, last) == (2, "cellmill preflight: no go: 3 reasons")
    assert json.loads(Path("results/preflight/one.json").read_text())["go"] is False


OUTSIDE = "not inside a SLURM job; use salloc or sbatch, or set-resources: train: launcher: slurm"
LARGER = "set-resources: train: nodes: 2, or a larger job"


@pytest.mark.parametrize(
    ("nodes", "line"),
    [
        (None, f"no  launcher: allocation: {OUTSIDE}"),
        ("2", f"no  launcher: allocation: job 5 has 2 nodes, requested: 4; {LARGER}"),
        ("4", "ok  launcher: allocation: job 5 has 4 nodes, requested: 4"),
    ],
)
def test_an_allocation_must_be_large_enough(
    preflight: Preflight,
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
    nodes: str | None,
    line: str,
) -> None:
    if nodes is not None:
        monkeypatch.setenv("SLURM_JOB_ID", "5")
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes)
    code, lines, _ = preflight(
        write_profile(launcher="allocation", nodes=4, nproc_per_node=2), "--no-job"
    )
    assert line in lines
    assert code == (0 if line.startswith("ok") else 2)


@pytest.mark.parametrize(
    ("profile", "words", "lines", "error"),
    [
        ({}, ["none"], [], "no profile 'none': none of profiles/none, "),
        ({}, ["one", "--wait-min", "nan"], [], "--wait-min: expected a number of minutes above 0, got nan"),
        ({"partition": "gpu"}, ["one"],
         ["no  profile: profiles/one/config.yaml: set-resources: train: unknown key 'partition'; did you mean "
          "'slurm_partition'?"], "no go: 1 reason"),
        ({"plan": {"device": "a1000"}}, ["one"],
         ["no  profile: unknown device 'a1000'; set device (--device, or set-resources: plan in the profile) "
          "to one of: cpu, "], "no go: 1 reason"),
    ],
)  # fmt: skip
def test_a_wrong_argument_or_machine_is_the_only_reason(
    preflight: Preflight, profile: dict[str, Any], words: list[str], lines: list[str], error: str
) -> None:
    write_profile(**profile)
    code, printed, last = preflight(*words)
    assert code == 2
    for found, start in zip(
        [*printed, last], [*lines, f"cellmill preflight: {error}"], strict=True
    ):
        assert found.startswith(start)


def test_a_plan_for_another_machine_is_reported(preflight: Preflight, project: Path) -> None:
    Path(write_profile(), "config.yaml").write_text(
        "default-resources: {slurm_partition: cpu}\nset-resources: {plan: {nodes: 2}, train: {nproc_per_node: 2}}\n"
    )
    code, lines, last = preflight("one", "--no-job")
    assert lines[1:4] == [
        "?   profile's name: snakemake --profile one does not find it; `cellmill profiles install` links it, or give "
        "profiles/one",
        "?   default-resources: slurm_partition does not reach a training, whose rule declares its own; write it under "
        "set-resources: train too",
        "no  plan's nodes: 2, but train has 1; remove set-resources: plan: nodes",
    ]
    assert (code, last) == (2, "cellmill preflight: no go: 1 reason")
    other = project / "home" / "snakemake" / "one" / "config.yaml"
    other.parent.mkdir(parents=True)
    other.write_text("cores: 1\n")
    _, lines, _ = preflight("one", "--no-job")
    assert (
        lines[1] == f"?   profile's name: snakemake --profile one reads {other}; give profiles/one"
    )


def test_a_configuration_that_is_wrong_is_a_reason(preflight: Preflight, project: Path) -> None:
    (project / "config.yaml").write_text(CONFIG.replace("lanes", "lane"))
    code, lines, _ = preflight(write_profile(), "--no-job")
    assert (
        "no  configuration: config.yaml: stream: unknown key 'lane'; did you mean 'lanes'?" in lines
    )
    assert code == 2


def test_genes_of_every_dataset_are_counted(
    preflight: Preflight, project: Path, make_h5ad: Callable[..., Path], counts: Any
) -> None:
    known = [name for name in gene_table("mouse").ids["symbol"] if name.endswith("Rik")][:35]
    mouse = make_h5ad(counts, "mouse.h5ad", genes=["Actb", "Gapdh", *known])
    odd = make_h5ad(
        counts, "odd.h5ad", genes=["ACTB", "GAPDH", "CD4", *(f"nothing{j}" for j in range(34))]
    )
    table = f"dataset\tpath\nsim\tnone.h5ad\nmouse\t{mouse}\nodd\t{odd}\n"
    (project / "datasets.tsv").write_text(table)
    (project / "config.yaml").write_text(
        CONFIG + "evaluate: {datasets: [odd]}\nembed: {min_coverage_frac: 0.9}\n"
    )
    code, lines, _ = preflight(write_profile(), "--no-job")
    genes = [line for line in lines if "genes of" in line]
    assert genes == [
        "?   genes of sim: none.h5ad does not exist yet",
        f"no  genes of mouse: {mouse}: 0 of 37 genes (0.0%) map to a human Ensembl id, preprocess.min_coverage_frac is "
        "0.5; 100.0% map as mouse: set preprocess.organism to mouse",
        f"no  genes of odd: {odd}: 3 of 37 genes (8.1%) map to a human Ensembl id, preprocess.min_coverage_frac is "
        "0.5; unknown: 'nothing0', 'nothing1', 'nothing2'; name genes by Ensembl id or symbol, or set a lower "
        "preprocess.min_coverage_frac in a configuration",
    ]
    assert code == 2
    # a vocabulary that has two of the genes and one that they lack
    folder = project / "results" / "corpora" / "sim"
    folder.mkdir(parents=True)
    rows = [
        "<pad>\t\t0\t0",
        "<mask>\t\t0\t0",
        "ENSG00000010610\tCD4\t5\t1.0",
        "ENSG00000075624\tACTB\t5\t1.0",
    ]
    rows += ["ENSG00000999999\tX\t5\t1.0"]
    header = "token_id\tgene_id\tsymbol\tn_cells\tmedian\n"
    text = header + "".join(f"{token}\t{row}\n" for token, row in enumerate(rows))
    (folder / "vocabulary.tsv").write_text(text)
    (project / "datasets.tsv").write_text(f"dataset\tpath\nodd\t{odd}\n")
    loose = CONFIG.replace("min_genes: 5", "min_genes: 5, min_coverage_frac: 0.05")
    for threshold, start in ((0.9, "?   "), (0.6, "ok  ")):
        (project / "config.yaml").write_text(loose + f"embed: {{min_coverage_frac: {threshold}}}\n")
        code, lines, _ = preflight(write_profile(), "--no-job")
        line = next(line for line in lines if "genes of" in line)
        figure = "genes of odd: 3 of 37 (8.1%) have a human Ensembl id; it has 2 (66.7%) of the vocabulary's 3 genes"
        doubt = "; embed.min_coverage_frac is 0.9, of counts, and checked when cells are embedded"
        assert line == start + figure + (doubt if threshold == 0.9 else "")
        assert code == 0


A100 = ["NVIDIA A100-SXM4-80GB"] * 4
SMALL = ["NVIDIA A100-PCIE-40GB"] * 4


def node(host: str = "n1", **changes: Any) -> dict[str, Any]:
    """Report of a node."""
    versions = {
        "python": python_version(),
        "cellmill": __version__,
        "torch": "2.13.0",
        "cuda": "12.8",
    }
    versions |= {"nccl": "2.27.5", "driver": "570.1"}
    written = {"written_bytes": 64 << 20, "write_s": 0.0671088640, "write_error": None}
    clock = {"token": "t", "head_time": 1000.0, "time": 1000.5, "seen": 1001.5}
    seen = {"host": host, "gpus": A100, "interfaces": ["eth0", "ib0", "lo"]}
    return seen | versions | written | clock | changes


def judge(*nodes: dict[str, Any], device: str = "a100", **machine: Any) -> list[str]:
    """The lines for nodes that were each to run 4 processes on 4 GPUs of `device`."""
    requested = slurm(gpus_per_node="4") | machine
    return [
        str(check)
        for check in judge_nodes(
            check_options(Machine, requested, "here"), device, list(nodes), "t"
        )
    ]


EXCLUDE = "sbatch_options: exclude=n2"
CLOCK = f"this machine, and Snakemake compares times of files; have it set, or {KEYS} {EXCLUDE}"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"token": None},
         "no  shared folder: n2 did not see a file that this machine had written and fsynced; work in a "
         f"folder that every node mounts, or {KEYS} {EXCLUDE}"),
        ({"write_s": 0.134217728}, "ok  write speed: 500 MB/s with fsync on n2, the slowest"),
        ({"write_s": 6.7108864},
         "?   write speed: 10 MB/s with fsync on n2, the slowest: checkpoints will be slow; work in a faster folder"),
        ({"write_s": None, "write_error": "No space left on device"},
         "no  write speed: n2 cannot write 64 MiB here: No space left on device; make room, or work in another folder"),
        ({"torch": "2.12.1"},
         f"no  torch: 2.13.0 on n1; 2.12.1 on n2; {KEYS} modules or container, or sbatch_options: exclude=n1"),
        ({"nccl": None},
         f"no  NCCL: 2.27.5 on n1; none on n2; {KEYS} modules or container, or sbatch_options: exclude=n1"),
        ({"gpus": ["NVIDIA H100"] * 4},
         "?   GPUs: 4 x NVIDIA A100-SXM4-80GB and NVIDIA H100 on n1, n2: the slowest sets "
         f"the pace; {KEYS} constraint or gpus_per_node: one type"),
        ({"gpus": ["NVIDIA A100"]},
         f"no  GPUs: n2 shows 1 to 4 processes; {KEYS} gpus_per_node: 4, nproc_per_node: 1, or device: cpu"),
        ({"gpus": []}, f"no  GPUs: n2 shows 0 to 4 processes; {KEYS} gpus_per_node: 4, or device: cpu"),
        ({"time": 1064.5}, f"?   clock: n2 is at least 63.0 s ahead of {CLOCK}"),
        ({"time": 995.5}, f"?   clock: n2 is at least 4.5 s behind {CLOCK}"),
    ],
    ids=str,
)  # fmt: skip
def test_what_differs_on_a_node_changes_one_line(changes: dict[str, Any], line: str) -> None:
    same = judge(node("n1"), node("n2"))
    assert same == [
        "ok  shared folder: n1, n2 and this machine read each other's files",
        "ok  write speed: 1,000 MB/s with fsync on n1, the slowest",
        f"ok  python: {python_version()} on n1, n2, {python_version()} here",
        f"ok  cellmill: {__version__} on n1, n2, {__version__} here",
        "ok  torch: 2.13.0 on n1, n2",
        "ok  CUDA: 12.8 on n1, n2",
        "ok  NCCL: 2.27.5 on n1, n2",
        "ok  driver: 570.1 on n1, n2",
        "ok  GPUs: 4 x NVIDIA A100-SXM4-80GB on n1, n2",
        "ok  clock: n1, n2 within 1.0 s of this machine",
    ]
    lines = judge(node("n1"), node("n2", **changes))
    assert [new for old, new in zip(same, lines, strict=True) if new != old] == [line]


@pytest.mark.parametrize(
    ("changes", "machine", "line"),
    [
        ({"cellmill": "0"},
         {}, f"no  cellmill: 0 on n1, {__version__} here; {KEYS} modules or container; or this environment"),
        ({"python": ".".join([*python_version().split(".")[:2], "99"])}, {}, "ok  python: "),
        ({"python": "2.7"}, {},
         f"no  python: 2.7 on n1, {python_version()} here; {KEYS} modules or container; or this"),
        ({}, {"device": "h100"},
         "?   GPUs: 4 x NVIDIA A100-SXM4-80GB on n1, but the plan assumes h100; set-resources: plan: device"),
        ({"gpus": SMALL}, {}, "?   GPUs: 4 x NVIDIA A100-PCIE-40GB on n1, but the plan assumes a100 with 80 GB; "
         "set-resources: plan: device: a100-40gb"),
        ({"gpus": ["NVIDIA H100 PCIe"] * 4}, {"device": "h100"},
         "?   GPUs: 4 x NVIDIA H100 PCIe on n1, but the plan assumes h100 with 80 GB; "
         "set-resources: plan: device: h100-pcie"),
        ({"gpus": ["NVIDIA H100 64GB HBM2"] * 4}, {"device": "h100"},
         "?   GPUs: 4 x NVIDIA H100 64GB HBM2 on n1, but the plan assumes 80 GB unless plan.memory_gb is set; "
         "plan.memory_gb: 64 in the configuration"),
        ({"gpus": ["NVIDIA GH200 480GB"] * 4}, {"device": "h200"},
         "?   GPUs: 4 x NVIDIA GH200 480GB on n1, but the plan assumes h200; set-resources: plan: device"),
        ({"gpus": SMALL}, {"device": "a100-40gb"}, "ok  GPUs: 4 x NVIDIA A100-PCIE-40GB on n1"),
        ({"gpus": [], "cuda": None, "torch": "2.13.0+cpu"}, {},
         "no  GPUs: torch 2.13.0+cpu on n1 is built without CUDA; "
         f"install a build with CUDA, or {KEYS} modules or container with one"),
        ({"gpus": []}, {"gpus_per_node": ""},
         "ok  GPUs: none requested and none visible: processes compute on CPU cores"),
    ],
    ids=str,
)  # fmt: skip
def test_a_node_is_compared_with_this_machine(
    changes: dict[str, Any], machine: dict[str, Any], line: str
) -> None:
    assert [each for each in judge(node(**changes), **machine) if each.startswith(line)]


def test_bandwidth_is_reported_with_its_interface() -> None:
    inside = [{"host": "n1", "bus_gb_per_s": 231.2}, {"host": "n2", "bus_gb_per_s": 229.96}]
    fast = {"backend": "nccl", "bytes": 256 << 20, "inside": inside, "between": 21.337}
    fast |= {"interfaces": {"n1": "mlx5_0", "n2": "mlx5_0"}}
    slow = fast | {"between": 1.1, "interfaces": {"n1": "eth0", "n2": "eth0"}}
    one = fast | {
        "inside": [{"host": "n1", "bus_gb_per_s": None}],
        "between": None,
        "interfaces": {"n1": None},
    }
    for interface, measured, line in (
        ("", fast, "ok  all-reduce in a node: 230 GB/s bus bandwidth on n2, the slowest, 256 MiB by nccl"),
        ("", fast, "ok  all-reduce between nodes: 21.3 GB/s bus bandwidth over mlx5_0, 256 MiB by nccl"),
        ("", slow,
         "?   all-reduce between nodes: 1.1 GB/s bus bandwidth over eth0, 256 MiB by nccl, though there is ib0; "
         f"{KEYS} interface: ib0"),
        ("ib0", slow, "?   all-reduce between nodes: 1.1 GB/s bus bandwidth over eth0, 256 MiB by nccl: slow for GPUs; "
         f"{KEYS} interface: one of the fast network"),
        ("", one, "ok  all-reduce: nothing to measure with one process; nccl works"),
    ):  # fmt: skip
        assert line in [
            str(check) for check in judge_allreduce(interface, [node("n1"), node("n2")], measured)
        ]


def test_loopback_traffic_does_not_count_as_network() -> None:
    assert find_busiest({"lo": 900, "eth0": 300, "ib0": 20}, 100) == "eth0"
    assert find_busiest({"lo": 900, "eth0": 30}, 100) == "lo", "all nodes are this machine"
    assert find_busiest({"lo": 9, "eth0": 30, "mlx5_0": 700, "mlx5_1": 700}, 100) == "mlx5_0"
    assert find_busiest({"lo": 9, "eth0": 30}, 100) is None
    assert find_busiest({}, 100) is None


def test_bus_bandwidth_is_defined_as_in_nccl_tests() -> None:
    # all_reduce_perf prints busbw = algbw * 2(n-1)/n; 2^30 bytes in 8 ms over 8 are 134.2 and 234.9
    # GB/s
    assert find_bus_rate(1 << 30, 0.008, 8) == pytest.approx(134.217728 * 1.75)
    assert find_bus_rate(1_000_000_000, 1.0, 2) == 1.0


NOT_MOUNTED = f"work in a folder that every node mounts, or {KEYS} sbatch_options: exclude="


@pytest.mark.parametrize(
    ("end", "hosts", "whole", "line"),
    [
        ({"queued_s": 4.4}, ["n1", "n2"], True, "ok  job: job 7 ran on n[1-2] after 4 s in the queue"),
        ({}, ["n1"], False, f"no  shared folder: n2 left nothing here (log: FOLDER/log); {NOT_MOUNTED}n2"),
        ({"lost": ("0-1", "Slurmd could not connect IO")}, [], False,
         f"no  shared folder: n1,n2 could not start: Slurmd could not connect IO (log: FOLDER/log); "
         f"{NOT_MOUNTED}n1,n2"),
        ({}, [], False,
         "no  job: job 7 ended with FAILED on n[1-2] before any process reported: No module named 'torch' "
         f"(log: FOLDER/log); work in a folder that the nodes mount; {KEYS} modules, container or mem_mb may be wrong"),
        ({}, ["n1", "n2"], False, "no  job: job 7 ended with FAILED on n[1-2] before its processes had connected "
         f"(log: FOLDER/log); {KEYS} interface: one that connects the nodes"),
        ({"path": Path("here"), "job_id": "", "nodes": ""}, ["n1"], False,
         "no  job: rank 3 on n1: RuntimeError: no (log: FOLDER/log)"),
        ({"path": Path("here")}, ["n1", "n2"], False, "no  job: rank 3 on n1: RuntimeError: no (log: FOLDER/log); "
         f"{KEYS} interface, modules or container may be wrong"),
    ],
    ids=str,
)  # fmt: skip
def test_a_failed_job_reports_its_progress(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: dict[str, Any],
    hosts: list[str],
    whole: bool,
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path("here", "error.txt").write_text("rank 3 on n1: RuntimeError: no\n")
    Path("log").write_text("srun: n1\nNo module named 'torch'\n\n")
    ended = {
        "path": tmp_path,
        "state": "FAILED",
        "job_id": "7",
        "nodes": "n[1-2]",
        "log": tmp_path / "log",
    }
    assert str(judge_end(End(**ended | end), hosts, whole)) == line.replace("FOLDER", str(tmp_path))


def test_each_machine_that_a_run_names_is_checked(preflight: Preflight, commands: Commands) -> None:
    named = {
        "slurm_partition": "short",
        "gpus_per_node": "",
        "nodes": 1,
        "nproc_per_node": 1,
        "runtime": 60,
    }
    Path("profiles/one").mkdir(parents=True)
    entries = {
        "train": slurm(),
        "plan": {"device": "a100"},
        "train.small": named,
        "plan.small": {"device": "cpu"},
    }
    Path("profiles/one/config.yaml").write_text(yaml.safe_dump({"set-resources": entries}))
    runs = "runs: {tiny: {corpus: sim, parallel: {strategy: ddp}, machine: small}, wide: {corpus: sim}}"
    Path("config.yaml").write_text(CONFIG.replace(CONFIG.splitlines()[-1], runs))
    code, lines, last = preflight("profiles/one", "--no-job")
    assert "ok  time limit: partition gpu (scontrol) allows 2880 min, requested: 600" in lines
    assert "ok  run wide: fits 8 processes: 2 replicas of 4 shards, cells not counted yet" in lines
    assert (
        "no  machine small, time limit: partition short (scontrol) allows 30 min, requested: 60; "
        "set-resources: train.small: runtime: 30"
    ) in lines
    assert "ok  machine small, run tiny: fits 1 process: 1 replica, cells not counted yet" in lines
    assert (code, last) == (2, "cellmill preflight: no go: 1 reason")
    record = json.loads(Path("results/preflight/one.json").read_text())
    assert record["machine"]["slurm_partition"] == "gpu"
    assert record["machines"]["small"]["machine"]["slurm_partition"] == "short"
    Path("config.yaml").write_text(
        CONFIG.replace(CONFIG.splitlines()[-1], runs.replace("small", "smal"))
    )
    code, lines, last = preflight("profiles/one", "--no-job")
    unknown = "no machine 'smal' in profiles/one/config.yaml; did you mean 'small'?"
    assert f"no  machine smal, profile: {unknown}" in lines


STAGES = """
executor: slurm
retries: 2
default-resources: {slurm_partition: cpu, mem_mb: 4000, runtime: 60}
set-threads: {shard: 16, evaluate: 8}
set-resources:
  preprocess: {mem_mb: 6000 * attempt, runtime: 120}
  vocabulary: {mem_mb: "min(9000 * attempt, 16000)", runtime: 31, slurm_partition: short}
  shard_part: {mem_mb_per_cpu: 7000}
  divide: {slurm_partition: short}
  consolidate: {slurm_partition: cpus}
  embed: {slurm_partition: gpu, gpu: 1, gpu_model: a100, mem_mb: "max(input.size_mb, 9)", runtime: "3d"}
  evaluate: {slurm_partition: gpu, gpu: 1, gpu_model: a100, runtime: 60, tasks_per_gpu: 0}
  train: {launcher: slurm, nodes: 2, nproc_per_node: 4, slurm_partition: gpu, gpus_per_node: "a100:4", runtime: 600}
"""


def test_each_stage_is_checked_against_its_partition(
    preflight: Preflight,
    project: Path,
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("profiles/one").mkdir(parents=True)
    Path("profiles/one/config.yaml").write_text(STAGES)
    sbatch = project / "bin" / "sbatch"
    too_much = "*partition=cpu*--mem=18000M*|*partition=cpu*--mem=[369]?000M*|*--cpus-per-task=16*"
    refuse = f'case "$*" in {too_much}) echo "{UNAVAILABLE}" >&2; exit 1;; esac'
    sbatch.write_text(sbatch.read_text().replace("#!/bin/sh", f"#!/bin/sh\n{refuse}"))
    given = Path("config.yaml").read_text()
    external = "{a: {command: 'run {cells} {out}'}, b: {preset: scvi}}"
    Path("config.yaml").write_text(
        f"{given}shard: {{jobs: 2}}\nevaluate: {{external: {external}}}\n"
    )
    code, lines, last = preflight("profiles/one", "--no-job")
    most = "mem_mb: 16000 at most, cpus_per_task: 8 at most"
    refused = f"no  stage {{stage}}, start: sbatch refuses cpu, 240 min, 32000 MB, 4 CPUs: {UNAVAILABLE}; "
    refused += f"set-resources: {{stage}}: {most}"
    assert [line for line in lines if "stage" in line] == [
        f"?   stage preprocess, attempt 3, start: sbatch refuses cpu, 120 min, 18000 MB, 1 CPU: {UNAVAILABLE}; "
        f"set-resources: preprocess: {most}",
        "no  stage vocabulary, time limit: partition short (scontrol) allows 30 min, requested: 31; set-resources: "
        "vocabulary: runtime: 30",
        "no  stage divide, time limit: partition short (scontrol) allows 30 min, requested: 240; set-resources: "
        "divide: runtime: 30",
        "ok  stage shard_part: fits cpu, 240 min, 7000 MB per cpu, 1 CPU",
        f"no  stage shard, start: sbatch refuses cpu, 240 min, 16000 MB, 16 CPUs: {UNAVAILABLE}; set-resources: shard: "
        f"{most}",
        "no  stage consolidate, partition: there is no 'cpus'; set-resources: consolidate: slurm_partition: one of "
        "cpu, gpu, new, short",
        "no  stage embed, time limit: partition gpu (scontrol) allows 2880 min, requested: 4320; set-resources: embed: "
        "runtime: 2880",
        *(
            refused.format(stage=stage)
            for stage in ("embed_external", "predict", "map", "knock_out")
        ),
        "ok  stage evaluate: fits gpu, 60 min, 32000 MB, 8 CPUs, GPUs a100:1",
        "ok  stage atlas: fits cpu, 60 min, 8000 MB, 1 CPU",
        "ok  stage unpack: fits cpu, 30 min, 2000 MB, 1 CPU",
        refused.format(stage="zoo"),
    ]
    assert (code, last) == (2, "cellmill preflight: no go: 10 reasons")
    Path("config.yaml").write_text(given)
    Path("profiles/one/config.yaml").write_text(
        STAGES.replace("gpu_model: a100, runtime", "gpu_model: 3090, runtime")
    )
    _, lines, _ = preflight("profiles/one", "--no-job")
    assert [line for line in lines if "stage evaluate" in line] == [
        "no  stage evaluate: profiles/one/config.yaml: set-resources: evaluate: gpu_model: expected a text, got the "
        "number 3090, for which Snakemake's plugin submits no job; write gpu_model: \"'3090'\""
    ]
    Path("profiles/one/config.yaml").write_text(STAGES)
    _, lines, _ = preflight("profiles/one", "--no-job")
    unused = (
        *("divide", "shard_part", "embed_external", "unpack", "zoo"),
        *("predict_changes", "import", "teach"),
    )
    assert not [line for line in lines if re.match(f"..  stage ({'|'.join(unused)})", line)]
    monkeypatch.setattr(sys, "executable", "/my env/bin/python")
    code, lines, last = preflight("profiles/one", "--no-job")
    assert (
        "no  stages' Python: /my env/bin/python: a job of a stage cannot start a Python whose path has spaces"
        in "".join(lines)
    )
    assert (code, last) == (2, "cellmill preflight: no go: 8 reasons")
