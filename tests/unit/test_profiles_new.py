"""Profiles: new with scripted answers of SLURM, as Snakemake reads it, with exact refusals; install
with real links.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cellmill.cli import main
from cellmill.config.machine import Machine
from cellmill.preflight.profile import evaluate, parse_assignment, read_profile
from cellmill.preflight.stage_requests import DECLARED, GPU_STAGES, NoInput
from tests.unit.slurm_site import CONFIG, command, scontrol

REPOSITORY = Path(__file__).resolve().parents[2]
SITE = """
c1|MIXED|64|256000|(null)|(null)|cpu*|UP|UNLIMITED
g1|ALLOCATED|92/96|1031000|gpu:h100:8(S:0-1),nvme:1|h100,ib|gpu|UP|2-00:00:00
g2|IDLE+POWERED_DOWN|128|2063000|gpu:h100:8(S:0-1)|h100,ib|gpu|UP|2-00:00:00
g3|IDLE|64|515000|gpu:a100:4(S:0-1)|a100|gpu|UP|2-00:00:00
g4|IDLE+DRAIN|96|1031000|gpu:h100:8(S:0-1)|h100,ib|gpu|UP|2-00:00:00
g1|ALLOCATED|92/96|1031000|gpu:h100:8(S:0-1),nvme:1|h100,ib|debug|UP|30:00
g1|ALLOCATED|92/96|1031000|gpu:h100:8(S:0-1),nvme:1|h100,ib|root|UP|UNLIMITED
m1|IDLE|32|128000|gpu:1g.10gb:14|(null)|mig|UP|1:00:00
x1|IDLE|32|128000|gpu:v100:16|(null)|old|DOWN|1:00:00
"""
LIMITS = {
    "gpu": "MaxNodes=4",
    "root": "RootOnly=YES",
    "cpu": "MaxMemPerNode=200000 MaxCPUsPerNode=2",
}
OF_A_GPU = ("gpu", "gpu_model", "gres", "tasks_per_gpu")


Cluster = Callable[..., None]
Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A function that scripts SLURM's commands; the working folder is empty."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)

    def answer(
        table: str = SITE,
        config: str = CONFIG,
        accounts: str = "",
        default: str = "",
        limits: dict[str, str] = LIMITS,
    ) -> None:
        qos = "normal|\nlong|7-00:00:00\nshort|03:00:00"
        answers: dict[str, Any] = {"scontrol": scontrol(table, config, **limits), "sacct": ""}
        answers["sacctmgr"] = {"show assoc": accounts, "show user": default, "show qos": qos}
        if not accounts:
            answers |= dict.fromkeys(("sacct", "sacctmgr"), "Slurm accounting storage is disabled")
        for name, texts in answers.items():
            command(tmp_path / "bin" / name, texts, code=int(name != "scontrol" and not accounts))

    return answer


def new(*words: str) -> tuple[Machine, dict[str, Any], str]:
    """Machine, whole tree and text of a profile that the command writes."""
    assert main(["profiles", "new", "mine", *words]) == 0
    text = Path("profiles/mine/config.yaml").read_text()
    return read_profile("mine").machine(), yaml.safe_load(text), text


def test_the_best_partition_has_the_figures_of_its_smallest_node(
    cluster: Cluster, capsys: Capsys
) -> None:
    cluster(accounts="lab||normal,long\nlab2||short\n", default="lab")
    machine, tree, text = new()
    assert machine == Machine(
        launcher="slurm",
        nproc_per_node=8,
        gpus_per_node="h100:8",
        slurm_partition="gpu",
        slurm_account="lab",
        runtime=1440,
        cpus_per_task=92,  # four of g1's 96 are reserved
        save_within_s=300,
    )
    assert capsys.readouterr().out.splitlines() == [
        "wrote profiles/mine/config.yaml",
        "  train     partition gpu: longest time limit of those with GPUs; also debug, mig (scontrol)",
        "            nodes 1, on each GPUs h100:8, 8 processes, 92 CPU cores, all memory; 1440 min per job",
        "  stages    partition cpu: the default, without GPUs (scontrol)",
        "  plan      device h100: type h100 of the nodes (scontrol)",
        "  account   lab: your default account (sacctmgr)",
        "  status    sacct: it answers, also while the controller does not",
        "next: cellmill preflight --profile profiles/mine",
    ]
    assert tree["slurm-status-command"] == "sacct"
    assert tree["default-resources"] == {
        "slurm_partition": "cpu",
        "slurm_account": "lab",
        "mem_mb": 4000,
        "disk_mb": 1000,
    }
    assert tree["set-threads"] == {
        "preprocess": 2, "shard": 2, "shard_part": 2, "embed": 8, "embed_external": 8, "predict": 8, "map": 8,
        "knock_out": 8, "evaluate": 8, "predict_changes": 8
    }  # fmt: skip
    on_a_gpu = {"slurm_partition": "gpu", "gpu": 1, "gpu_model": "h100", "tasks_per_gpu": 0}
    assert tree["set-resources"]["embed"] == on_a_gpu | {
        "mem_mb": "min(int(32000 + input.size_mb / 3) * attempt, 2063000)",
        "runtime": "min(int(240 + input.size_mb / 25) * attempt, 2880)",
    }
    assert tree["set-resources"]["plan"] == {"device": "h100"}
    lines = {line.strip().partition(" ")[0]: line for line in text.splitlines() if "#" in line}
    assert lines["runtime:"].endswith(
        "; a day, below the limit of 2880 min of partition gpu (scontrol)"
    )
    assert lines["cpus_per_task:"].endswith(
        "# CPU cores per node; all of the smallest node (scontrol)"
    )


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        # slices of one GPU cannot form a training
        (["--partition", "mig"],
         {"gpus_per_node": "1g.10gb:1", "nproc_per_node": 1, "cpus_per_task": 2, "runtime": 60}),
        # a share of the smallest node that has them; a100 are too few
        (["--gpus", "6"], {"gpus_per_node": "h100:6", "nproc_per_node": 6, "cpus_per_task": 69, "mem_mb": 773250}),
        (["--nodes", "2-2", "--qos", "max"], {"nodes": "2-2", "gpus_per_node": "h100:8", "qos": "max"}),
        (["--gpus", "0"], {"slurm_partition": "cpu", "nproc_per_node": 1, "cpus_per_task": 2, "mem_mb": 200000}),
        (["--partition", "debug", "--account", "all"], {"runtime": 30, "slurm_account": "all", "save_within_s": 300}),
    ],
    ids=str,
)  # fmt: skip
def test_options_override_what_the_site_suggests(
    cluster: Cluster, words: list[str], wanted: dict[str, Any]
) -> None:
    cluster()
    machine, tree, _ = new(*words)
    assert {key: getattr(machine, key) for key in wanted} == wanted
    assert "slurm_account" not in tree["default-resources"] or "--account" in words, (
        "nothing is known to be charged"
    )
    assert tree["slurm-status-command"] == "squeue"


ONE_A100 = {"gpu": 1, "gpu_model": "a100", "tasks_per_gpu": 0}


def site(
    gres: str, features: str = "(null)", name: str = "p", memory: int = 64000, limit: str = "20:00"
) -> str:
    return f"n1|IDLE|16|{memory}|{gres}|{features}|{name}*|UP|{limit}"


@pytest.mark.parametrize(
    ("table", "config", "train", "embed", "device"),
    [
        (site("gpu:h100:4"), CONFIG.replace("cons_tres", "cons_res"),
         {"gres": "gpu:h100:4", "nproc_per_node": 4, "gpus_per_node": ""},
         {"gres": "gpu:h100:1", "tasks_per_gpu": 0}, "h100"),
        # the plugin refuses a hyphen in gpu_model
        (site("gpu:nvidia_a100-sxm4-80gb:2,shard:a100:16"), CONFIG,
         {"gpus_per_node": "nvidia_a100-sxm4-80gb:2", "nproc_per_node": 2}, {"gpu": 1, "tasks_per_gpu": 0},
         "a100-80gb"),
        (site("gpu:a100:2", "ib_40g,gpu_40gb"), CONFIG, {}, ONE_A100, "a100-40gb"),
        (site("gpu:a100:2", "ib_40g"), CONFIG, {}, ONE_A100, "a100?"),
        (site("gpu:h100_64gb:2"), CONFIG, {}, ONE_A100 | {"gpu_model": "h100_64gb"},
         "h100?"),
        (site("gpu:2", "ib,h200"), CONFIG, {"gpus_per_node": "2"}, {"gpu": 1, "tasks_per_gpu": 0}, "h200"),
        (site("gpu:rtx_a1000"), CONFIG, {"gpus_per_node": "rtx_a1000:1"},
         {"gpu": 1, "gpu_model": "rtx_a1000", "tasks_per_gpu": 0}, "a100?"),
        (site("gpu:3090:2"), CONFIG, {"gpus_per_node": "3090:2"},
         {"gpu": 1, "gpu_model": "'3090'", "tasks_per_gpu": 0}, "a100?"),
        # names that Snakemake and YAML read as something else
        (site("gpu:max:2", name="all"), CONFIG, {"slurm_partition": "all"},
         {"gpu": 1, "gpu_model": "'max'", "tasks_per_gpu": 0}, "a100?"),
        (site("N/A", name="null", limit="1:00"), CONFIG, {"slurm_partition": "null", "save_within_s": 15}, {}, "cpu"),
    ],
    ids=[
        "gres only", "hyphen", "of 40 GB", "of unknown GB", "of 64 GB", "no type", "unknown type", "digits",
        "Python names", "no GPUs",
    ],
)  # fmt: skip
def test_unusual_sites_are_read(
    cluster: Cluster,
    table: str,
    config: str,
    train: dict[str, Any],
    embed: dict[str, Any],
    device: str,
) -> None:
    cluster(table, config)
    machine, tree, text = new()
    assert {key: getattr(machine, key) for key in train} == train
    assert {
        key: value for key, value in tree["set-resources"]["embed"].items() if key in OF_A_GPU
    } == embed
    assert tree["set-resources"]["plan"] == {"device": device.rstrip("?")}
    line = next(line for line in text.splitlines() if line.strip().startswith("plan:"))
    assert ("assumed: " in line) == ("?" in device)
    assumptions = {
        "a100?": "a100 is planned with 80 GB; set device to a100-40gb if it has less",
        "h100?": "assumed: 80 GB; set plan.memory_gb to 64 in the configuration",
    }
    for assumed, words in assumptions.items():
        assert (words in line) == (device == assumed)


def test_no_attempt_exceeds_the_limits_of_its_partition(cluster: Cluster) -> None:
    cluster(
        SITE.replace("c1|MIXED|64|256000", "c1|MIXED|64|20000").replace(
            "cpu*|UP|UNLIMITED", "cpu*|UP|3:20:00"
        )
    )
    _, tree, _ = new("--partition", "debug")
    for stage, declared in DECLARED.items():
        gpu = stage in GPU_STAGES
        for key, limit in (("runtime", 30 if gpu else 200), ("mem_mb", 1031000 if gpu else 20000)):
            # or its rule's
            text = tree["set-resources"].get(stage, {}).get(key, f"{declared[key][0]} * attempt")
            requests = [
                evaluate(parse_assignment(f"{key}={text}"), attempt=attempt, input=NoInput())[key]
                for attempt in range(1, tree["retries"] + 2)
            ]
            assert requests == sorted(requests), f"{stage} {key}: a retry gets less"
            assert max(requests) <= limit, f"{stage} {key}"
    assert tree["set-resources"]["shard"]["runtime"] == 200
    assert (
        tree["set-resources"]["shard"]["mem_mb"]
        == "min(int(16000 + input.size_mb / 12) * attempt, 20000)"
    )


@pytest.mark.parametrize(
    ("limits", "key", "megabytes"),
    [
        ("MaxMemPerCPU=4000", "mem_mb_per_cpu", 4000),
        ("JobDefaults=DefCpuPerGPU=8,DefMemPerGPU=120000", "mem_mb_per_gpu", 120000),
    ],
)
def test_memory_is_requested_in_the_unit_of_the_partition(
    cluster: Cluster, limits: str, key: str, megabytes: int
) -> None:
    cluster(site("gpu:h100:4"), limits={"p": limits})
    machine, tree, _ = new()
    assert machine.memory_key == key
    assert tree["set-resources"]["train"][key] == megabytes
    assert "mem_mb" not in tree["set-resources"]["train"]


def test_memory_is_not_requested_where_slurm_does_not_manage_it(cluster: Cluster) -> None:
    cluster(site("gpu:h100:4", memory=1))
    machine, tree, _ = new("--gpus", "1")
    assert (
        machine.mem_mb
        == tree["default-resources"]["mem_mb"]
        == tree["set-resources"]["shard"]["mem_mb"]
        == 0
    )


@pytest.mark.parametrize(
    ("accounts", "default", "limits", "wanted"),
    [
        ("lab||normal\n", "", "", ("lab", "", "your only account (sacctmgr)")),
        ("a||x\nb||y\n", "", "", ("", "", "one of a, b (sacctmgr); --account chooses it")),
        ("a||x\nb||gpu,normal\n", "a", "AllowAccounts=b,c AllowQos=long,normal,gpu",
         ("b", "normal", "your only account that partition p accepts (sacctmgr)")),
    ],
    ids=["one", "several", "not the default"],
)  # fmt: skip
def test_the_account_is_accepted_by_the_partition(
    cluster: Cluster, accounts: str, default: str, limits: str, wanted: tuple[str, str, str]
) -> None:
    cluster(site("gpu:h100:4"), accounts=accounts, default=default, limits={"p": limits})
    machine, tree, text = new()
    assert (machine.slurm_account, machine.qos) == wanted[:2]
    assert tree["default-resources"].get("slurm_account", "") == wanted[0]
    assert tree["set-resources"]["embed"].get("qos", "") == wanted[1]
    assert wanted[2] in text


def test_accounts_of_another_cluster_do_not_count(cluster: Cluster, tmp_path: Path) -> None:
    cluster(site("gpu:h100:4"), accounts="lab||normal\n")
    answers = {"clusters=north": "lab||normal\n", "show assoc": "lab||normal\nother||normal\n"}
    command(tmp_path / "bin/sacctmgr", answers | {"show user": "", "show qos": "normal|\n"})
    machine, _, _ = new()
    assert machine.slurm_account == "lab"


@pytest.mark.parametrize(
    ("accounts", "limits", "words", "runtime", "source"),
    [
        ("lab||short\n", "", [], 180, "limit of QOS short (sacctmgr)"),
        ("lab||short,normal\n", "", [], 300, "limit of partition p (scontrol)"),
        ("lab||short,normal\n", "", ["--qos", "short"], 180, "limit of QOS short (sacctmgr)"),
        ("lab||normal\n", "QoS=short", [], 180, "limit of QOS short (sacctmgr)"),
    ],
    ids=["only one", "unknown", "named", "the partition's"],
)
def test_a_time_limit_of_the_qos_is_kept(
    cluster: Cluster, accounts: str, limits: str, words: list[str], runtime: int, source: str
) -> None:
    cluster(site("gpu:h100:4", limit="5:00:00"), accounts=accounts, limits={"p": limits})
    machine, tree, text = new(*words)
    assert machine.runtime == runtime
    assert tree["set-resources"]["evaluate"]["runtime"] in (
        f"min(240 * attempt, {runtime})",
        runtime,
    )
    assert source in text


def test_squeue_that_forgets_jobs_too_soon_is_named(cluster: Cluster) -> None:
    cluster(config=CONFIG.replace("300 sec", "60 sec"))
    _, tree, text = new()
    assert tree["slurm-status-command"] == "squeue"
    reason = "MinJobAge is 60 sec (scontrol), so squeue may forget a job before its end was seen: have it raised"
    assert reason in text


CONTENTS = "gpu: 2 nodes with 8 x h100, 1 node with 4 x a100, at most 4 in a job"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine", "--partition", "gp"],
         "--partition gp: there is none; expected one of cpu, debug, gpu, mig, old, root"),
        (["mine", "--partition", "old"], "--partition old: it is down; expected one that is up"),
        (["mine", "--partition", "gpu", "--gpus", "9"],
         f"--partition gpu --nodes 1 --gpus 9: expected at most what is up, which is {CONTENTS}"),
        (
            ["mine", "--nodes", "2-4"],
            f"--nodes 2-4: expected at most what is up, which is cpu: 1 node with no GPU; debug: 1 node with 8 x h100; "
            f"{CONTENTS}; mig: 1 node with 14 x 1g.10gb",
        ),
        (["mine", "--partition", "cpu", "--gpus", "2"],
         "--partition cpu --nodes 1 --gpus 2: expected at most what is up, which is cpu: 1 node with no GPU"),
        (["mine", "--nodes", "4-2"], "--nodes: expected a number such as 2 or a range such as 2-4, got '4-2'"),
        (["mine", "--gpus=-1"], "--gpus: expected a number of GPUs per node, 0 for none, got -1"),
        (["default"], "NAME default: Snakemake loads a profile of that name unasked; choose another"),
        (["../x"], "NAME: expected letters, digits, '.', '_' and '-', got '../x'"),
        (["taken"], "profiles/taken/config.yaml: exists; choose another NAME, or remove it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_refusal_writes_nothing(
    cluster: Cluster, capsys: Capsys, words: list[str], message: str
) -> None:
    cluster()
    Path("profiles/taken").mkdir(parents=True)
    Path("profiles/taken/config.yaml").write_text("cores: 1\n")
    assert main(["profiles", "new", *words]) == 2
    assert capsys.readouterr().err == f"cellmill profiles: {message}\n"
    assert [str(path) for path in Path("profiles").rglob("*.yaml")] == [
        "profiles/taken/config.yaml"
    ]


def test_a_missing_slurm_controller_is_reported(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    said = "slurm_load_partitions: Unable to contact slurm controller (connect failure)"
    command(tmp_path / "bin" / "scontrol", said, code=1)
    assert main(["profiles", "new", "mine"]) == 2
    answer = "cellmill profiles: scontrol: "
    assert capsys.readouterr().err == f"{answer}{said}; try again when SLURM's controller answers\n"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["profiles", "new", "mine"]) == 2
    assert (
        capsys.readouterr().err == f"{answer}not on PATH; run this on a login node of the cluster\n"
    )


def test_snakemake_takes_every_line_of_a_new_profile(cluster: Cluster, tmp_path: Path) -> None:
    """With the names that it would evaluate, and limits that it has to evaluate."""
    cluster(site("gpu:max:2", name="all", limit="5:00:00"))
    new("--nodes", "1-1", "--account", "input")
    shutil.copytree(REPOSITORY / "config", tmp_path / "config")
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(REPOSITORY / "Snakefile"),
        "-n",
    ]
    done = subprocess.run(
        [*command, "--profile", "profiles/mine"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rules = dict(
        re.findall(r"^(?:local)?rule (\w+):\n(?:    .*\n)*?    resources: (.*)$", done.stdout, re.M)
    )
    assert "slurm_partition=all, slurm_account=input" in rules["vocabulary"]
    assert "gpu_model=max" in rules["embed"]
    assert "runtime=240" in rules["evaluate"]
    assert "nodes=1-1" in rules["train"]


NAMES = ["local", "slurm", "slurm-a100", "slurm-h100"]


def install(root: Path) -> int:
    return main(["profiles", "install", "--from", str(root / "profiles")])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path / ".config" / "snakemake"


def test_snakemake_finds_a_linked_profile_by_its_name(
    root: Path, home: Path, tmp_path: Path
) -> None:
    assert install(root) == 0
    assert sorted(path.name for path in home.iterdir()) == NAMES
    code = (
        "import sys; from snakemake.cli import get_profile_dir; print(get_profile_dir('slurm')[1])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()).resolve() == root / "profiles" / "slurm" / "config.yaml"
    assert install(root) == 0
    assert sorted(path.name for path in home.iterdir()) == NAMES, "again, which changes nothing"


@pytest.mark.parametrize("kind", ["folder", "dangling link"])
def test_a_taken_name_is_left_and_the_others_are_linked(
    root: Path, home: Path, tmp_path: Path, capsys: Capsys, kind: str
) -> None:
    home.mkdir(parents=True)
    if kind == "folder":
        (home / "slurm").mkdir()
    else:
        (home / "slurm").symlink_to(tmp_path / "nowhere")
    assert install(root) == 0
    lines = capsys.readouterr().out.splitlines()
    [left] = [line for line in lines if line.startswith("slurm: not linked")]
    assert left.endswith(f"; use --profile {root}/profiles/slurm")
    assert (home / "slurm").is_symlink() == (kind == "dangling link")
    linked = [home / name for name in NAMES if name != "slurm"]
    assert lines[-1] == f"to undo: rm {shlex.join(map(str, linked))}"


def test_a_second_project_links_its_own_profiles(root: Path, home: Path, tmp_path: Path) -> None:
    assert install(root) == 0
    for name in ("local", "mine"):
        (tmp_path / "second" / "profiles" / name).mkdir(parents=True)
        (tmp_path / "second" / "profiles" / name / "config.yaml").write_text("cores: 1\n")
    assert install(tmp_path / "second") == 0
    assert (home / "mine").resolve() == tmp_path / "second" / "profiles" / "mine"
    assert (home / "local").resolve() == root / "profiles" / "local"


def test_without_a_free_name_nothing_is_linked(
    root: Path, home: Path, tmp_path: Path, capsys: Capsys
) -> None:
    (tmp_path / "one" / "profiles" / "slurm").mkdir(parents=True)
    (tmp_path / "one" / "profiles" / "slurm" / "config.yaml").write_text("cores: 1\n")
    assert install(root) == 0
    assert install(tmp_path / "one") == 2
    assert capsys.readouterr().err.endswith(
        f"no profile is linked, because their names are taken in {home}\n"
    )
    assert (home / "slurm").resolve() == root / "profiles" / "slurm"


def test_the_checkouts_own_folder_is_not_linked_into_itself(root: Path, home: Path) -> None:
    home.parent.mkdir()
    home.symlink_to(root / "profiles")
    assert install(root) == 0
    assert not any(path.is_symlink() for path in (root / "profiles").iterdir())


def test_the_undo_command_works_with_a_space_in_the_path(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "my settings"))
    assert install(root) == 0
    undo = capsys.readouterr().out.splitlines()[-1].removeprefix("to undo: ")
    subprocess.run(["sh", "-c", undo], check=True)
    assert list((tmp_path / "my settings" / "snakemake").iterdir()) == []
    assert (root / "profiles" / "slurm" / "config.yaml").exists()


def test_a_folder_without_profiles_is_refused(home: Path, tmp_path: Path, capsys: Capsys) -> None:
    assert main(["profiles", "install", "--from", str(tmp_path)]) == 2
    remedy = "run this at the root of a checkout, or set --from FOLDER"
    assert capsys.readouterr().err == f"cellmill profiles: {tmp_path}: has no profiles; {remedy}\n"
    assert not home.exists()


def test_a_profile_called_default_is_refused(home: Path, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "profiles" / "default").mkdir(parents=True)
    (tmp_path / "profiles" / "default" / "config.yaml").write_text("cores: 1\n")
    assert install(tmp_path) == 2
    assert capsys.readouterr().err == (
        f"cellmill profiles: {tmp_path}/profiles/default: Snakemake loads a profile of that name unasked, and it "
        "overrides --profile key by key; rename it\n"
    )
    assert not home.exists()
