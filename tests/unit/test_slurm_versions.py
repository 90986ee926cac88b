"""Answers of SLURM 22.05 to 26.05, written by hand in the fields, order and words of each version's
sources (src/api and src/common of the tags slurm-22-05-11-1 to slurm-26-05-3-1).
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from cellmill.config.machine import Machine
from cellmill.launch.queue import Queue, QueuedJob, explained, parse
from cellmill.preflight.site import ask_slurm, estimate_start
from cellmill.runs.slurm import ALIVE, ENDED, JobState
from tests.unit.slurm_site import CONFIG, command

STATES = (
    "COMPLETING STAGE_OUT CONFIGURING RESIZING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT STOPPED REVOKED "
    "RESV_DEL_HOLD SIGNALING PENDING RUNNING SUSPENDED COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL PREEMPTED "
    "BOOT_FAIL DEADLINE OUT_OF_MEMORY"
).split()
"""Words of squeue's %T in every version."""
ENDED_WORDS = "REVOKED COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL PREEMPTED BOOT_FAIL DEADLINE OUT_OF_MEMORY"


@dataclass(frozen=True)
class Version:
    """Words that a version adds to the lines of the one before."""

    limits: str = ""  # of a partition, after MaxCPUsPerNode
    exclusive: str = "ExclusiveUser=NO"
    of_partition: str = ""  # of a partition, at the end
    of_node: str = ""
    of_job: str = "TRES=cpu=8,mem=64G,node=1,gres/gpu:a100=4"
    node_states: tuple[tuple[str, bool], ...] = ()  # further states, and True for usable nodes
    states: tuple[str, ...] = ()  # further words of squeue's %T
    reasons: tuple[str, ...] = ()  # further reasons of pending jobs
    starts: str = ""  # of sbatch --test-only, after the time


REQUESTED = "ReqTRES=cpu=8,mem=64G,node=1,gres/gpu=4 AllocTRES=cpu=8,mem=64G,node=1,gres/gpu:a100=4"
SOCKETS = "MaxCPUsPerSocket=UNLIMITED"
VERSIONS = {
    "22.05": Version(),
    "23.02": Version(
        SOCKETS,
        of_node="ResumeAfterTime=None",
        of_job=REQUESTED,
        reasons=("ReservationInvalid",),
    ),
    "23.11": Version(
        SOCKETS,
        of_node="ResumeAfterTime=None InstanceId=i-1 InstanceType=p4d",
        of_job=REQUESTED,
        node_states=(("IDLE+BLOCKED", True),),
        reasons=("Constraints",),
    ),
    "24.05": Version(
        SOCKETS,
        "ExclusiveUser=NO ExclusiveTopo=NO",
        of_node="ResumeAfterTime=None RestrictedCoresPerGPU=gpu:2",
        of_job=f"{REQUESTED} StepMgrEnabled=Yes",
        node_states=(("IDLE+BLOCKED", True),),
        reasons=("MaxPoweredUpNodes", "MpiPortsBusy", "MaxGRESRunMinsPerUser"),
    ),
    "24.11": Version(
        SOCKETS,
        "ExclusiveUser=NO ExclusiveTopo=NO",
        of_job=f"{REQUESTED} StepMgrEnabled=Yes",
        node_states=(("IDLE+BLOCKED", True),),
        reasons=("MaxNodeRunMinsPerAccount",),
    ),
    "25.05": Version(
        SOCKETS,
        "ExclusiveUser=NO ExclusiveTopo=NO",
        of_partition="Topology=default",
        of_node="Topology=default:s0",
        of_job=REQUESTED,
        node_states=(("IDLE+EXTERNAL+DYNAMIC_NORM", True),),
    ),
    "25.11": Version(
        SOCKETS,
        "ExclusiveUser=NO ExclusiveTopo=NO",
        of_partition="Topology=default",
        of_node="Topology=default:s0 Parameters=(null)",
        of_job=REQUESTED,
        states=("EXPEDITING",),
        reasons=("NvidiaImexChannels",),
    ),
    "26.05": Version(
        SOCKETS,
        "Exclusive=NO",
        of_partition="Topology=default",
        of_node="SuspendTime=None",
        of_job=REQUESTED,
        states=("EXPEDITING",),
        starts=" on cluster c1 a",
    ),
}
PARTITION = (
    "PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A "
    "DefaultTime=01:00:00 DisableRootJobs=NO {exclusive} GraceTime=120 Hidden=NO MaxNodes=4 MaxTime=2-00:00:00 "
    "MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED {limits} Nodes=g[1-3] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO "
    "ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=REQUEUE State=UP TotalCPUs=192 TotalNodes=3 "
    "SelectTypeParameters=NONE JobDefaults=DefCpuPerGPU=16,DefMemPerGPU=64000 DefMemPerNode=UNLIMITED "
    "MaxMemPerCPU=8000 TRES=cpu=192,mem=1500G,node=3,billing=192,gres/gpu=12 {of_partition}"
)
NODE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=32 CPUAlloc=0 CPUEfctv=60 CPUTot=64 CPULoad=0.02 "
    "AvailableFeatures=a100,ib ActiveFeatures=a100,ib Gres=gpu:a100:4(S:0-1),lscratch:200 NodeAddr=g1 NodeHostName=g1 "
    "Version=x OS=Linux 5.14.0 #1 SMP Mon RealMemory=515000 AllocMem=0 FreeMem=500000 Sockets=2 Boards=1 "
    "State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MemSpecLimit=3000 MCS_label=N/A Partitions=gpu "
    "BootTime=2031-02-03T04:05:06 LastBusyTime=2031-02-03T04:05:06 {of_node} CfgTRES=cpu=64,mem=515000M,gres/gpu=4"
)
NODE_STATES = (
    ("IDLE", True),
    ("MIXED+PLANNED", True),
    ("IDLE+CLOUD+POWERED_DOWN", True),
    ("IDLE+DRAIN", False),
    ("IDLE+DRAIN+INVALID_REG", False),
    ("DOWN+DRAIN+NOT_RESPONDING", False),
    ("IDLE+MAINTENANCE+RESERVED", False),
)
JOB = (
    "JobId=7 JobName=cellmill-a-1 UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A Priority=1 Nice=0 Account=a QOS=b "
    "JobState={state} Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "RunTime=00:01:00 TimeLimit=01:00:00 TimeMin=N/A SubmitTime=2031-02-03T04:05:06 Partition=gpu NodeList=g1 {of_job} "
    "Command=/a b/c.sh WorkDir=/a b"
)
REASONS = (
    "Priority Resources Dependency PartitionNodeLimit PartitionTimeLimit PartitionDown PartitionInactive JobHeldAdmin "
    "JobHeldUser BeginTime Licenses AssociationJobLimit Reservation ReqNodeNotAvail BadConstraints SystemFailure "
    "JobLaunchFailure InvalidAccount InvalidQOS QOSUsageThreshold QOSResourceLimit QOSTimeLimit Cleaning Prolog "
    "QOSNotAllowed AccountNotAllowed DependencyNeverSatisfied QOSMaxGRESPerNode PartitionConfig AccountingPolicy "
    "MaxMemPerLimit ReservationDeleted JobHoldMaxRequeue QOSGrpCPUMinutesLimit AssocMaxSubmitJobLimit"
).split()
"""Reasons of a pending job of cellmill in every version; others are of arrays, federations and burst
buffers, or of ended jobs.
"""
SENTENCES = (
    "launch_failed_requeued_held",
    "launch failed requeued held",
    "job_requeued_in_held_state",
    "job requeued in held state",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
    "ReqNodeNotAvail, UnavailableNodes:g[1-2]",
    "ReqNodeNotAvail, Reserved for maintenance",
    "Job is at or exceeds QOS a's group wall limit of 10 with 12",
)

versions = pytest.mark.parametrize("version", VERSIONS.values(), ids=VERSIONS)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is alone on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def state_of(word: str) -> JobState:
    """State of the one job that squeue lists with `word`."""
    [job] = parse(f"7|{word}|None|g1|10:00|cellmill-a-1\n")
    assert isinstance(job, QueuedJob)
    return job.state


@versions
def test_every_state_of_a_job_is_known(version: Version) -> None:
    words = [*STATES, *version.states]
    assert {word for word in words if state_of(word).alive} == set(words) - set(ENDED_WORDS.split())
    assert set(words) <= ALIVE | ENDED


@versions
def test_every_reason_to_wait_has_a_sentence(version: Version) -> None:
    for reason in (*REASONS, *SENTENCES, *version.reasons):
        line = explained(JobState("PENDING", reason), runtime="1 h", nodes="2", job_id="7")
        assert line.startswith(f"PENDING ({reason}): "), reason


def test_a_lost_reservation_names_the_keys_of_the_profile() -> None:
    line = explained(JobState("PENDING", "ReservationDeleted"))
    assert line == (
        "PENDING (ReservationDeleted): its reservation is gone: change reservation in the profile "
        "(slurm-reservation for stages)"
    )


@versions
def test_partitions_and_nodes_are_read(version: Version, programs: Path) -> None:
    partition = PARTITION.format(
        exclusive=version.exclusive, limits=version.limits, of_partition=version.of_partition
    )
    states = NODE_STATES + version.node_states
    nodes = [
        NODE.format(name=f"g{number}", state=state, of_node=version.of_node)
        for number, (state, _) in enumerate(states)
    ]
    shown = {"show partition": partition, "show node": "\n".join(nodes), "show config": CONFIG}
    command(programs / "scontrol", shown)
    read = ask_slurm().partitions["gpu"]
    assert (read.default, read.state, read.limit_min, read.max_nodes) == (True, "up", 2880, 4)
    assert (read.mb_per_cpu, read.mb_per_gpu, read.accounts, read.reserved) == (
        8000,
        64000,
        None,
        False,
    )
    assert [node.up for node in read.nodes] == [usable for _, usable in states]
    node = read.nodes[0]
    assert (node.gpus, node.cpus, node.memory_mb, node.usable_mb) == (
        {"a100": 4},
        60,
        512000,  # without MemSpecLimit
        480000,
    )
    assert node.features == {"a100", "ib"}


@versions
def test_a_job_that_the_controller_shows_is_alive(version: Version, programs: Path) -> None:
    job = QueuedJob("7", JobState("PENDING"), "cellmill-a-1")
    for state, alive in [("RUNNING", True), ("PENDING", True), ("NODE_FAIL", False)]:
        command(programs / "scontrol", JOB.format(state=state, of_job=version.of_job))
        assert Queue(0).controller_has(job) == alive


@versions
def test_the_estimate_of_a_start_is_read(version: Version, programs: Path) -> None:
    line = (
        f"sbatch: Job 7 to start at 2031-02-03T04:05:06{version.starts} using 8 processors on nodes g[1-2] in "
        "partition gpu"
    )
    command(programs / "sbatch", line, to_stderr=True)
    assert estimate_start(Machine()) == "2031-02-03 04:05:06 on g[1-2]"


@versions
def test_an_ended_job_is_known_by_accounting(version: Version, programs: Path) -> None:
    job = QueuedJob("7", JobState("PENDING"), "cellmill-a-1")
    command(programs / "squeue", "")
    for answer, name in [
        ("CANCELLED by 1000|cellmill-a-1", "CANCELLED"),
        ("NODE_FAIL|cellmill-a-1\nCOMPLETED|cellmill-a-1", "COMPLETED"),
        ("OUT_OF_MEMORY|cellmill-a-1", "OUT_OF_MEMORY"),
        ("COMPLETED|another", "NOT_LISTED"),
    ]:
        command(programs / "sacct", answer)
        assert Queue(0).state(job).name == name
