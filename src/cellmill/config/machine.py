"""The machine of a training: a profile's `set-resources: train:`, and flags of `cellmill train`.

Each field is a resource of the rule train and a flag of the command; rule and command take names
and defaults from here. A profile is trusted like code, since `setup` is a command. All other values
are quoted where the batch script is written (launch/submit.py), so they have to be one line, and no
more.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from cellmill.config.section import Section

# options of sbatch that the launcher sets: another value would lose the job or its log
OURS = (
    "nodes ntasks ntasks-per-node job-name output error open-mode signal requeue no-requeue array "
    "wrap parsable chdir export"
).split()
OURS_OF_SRUN = (
    "nodes ntasks ntasks-per-node cpus-per-task kill-on-bad-exit overlap unbuffered output error "
    "label multi-prog gpus-per-node gres chdir export jobid"
).split()
MEMORY = ("mem_mb", "mem_mb_per_cpu", "mem_mb_per_gpu")  # as sbatch's mem, mem-per-cpu, mem-per-gpu
MB = 1 << 20  # bytes of a MB of SLURM
# options that a plan reads too
PLANNED = ("nodes", "nproc_per_node", *MEMORY, "cpus_per_task", "gpus_per_node", "gres")
Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


def options_in(words: str) -> dict[str, str | bool]:
    """Options in a text such as `exclude=node7 exclusive`, by name; True for those without a value."""
    pairs = [word.removeprefix("--").partition("=") for word in words.split()]
    return {name: value if equals else True for name, equals, value in pairs}


def flags(options: Mapping[str, str | bool]) -> list[str]:
    return [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()
    ]


def gpus_in(gres: str) -> dict[str, int]:
    """Number of GPUs by type, "" for GPUs without one.

    `gpu:a100:4(S:0-1),gpu:2,nvme:1` is {"a100": 4, "": 2}.
    """
    gpus: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        match = re.fullmatch(r"gpu(?::([^:]+?))??(?::(\d+))?", part.strip())
        if match:
            gpus[match[1] or ""] = gpus.get(match[1] or "", 0) + int(match[2] or 1)
    return gpus


class Machine(Section):
    """The processes of a training, and where they run."""

    launcher: Literal["local", "slurm", "allocation"] = "local"
    """local: processes on this machine; slurm: submitted jobs; allocation: in the job that cellmill
    runs in.
    """
    nodes: Text = "1"
    """Number of nodes, such as 2; with a range such as 1-2 the run continues on fewer."""
    nproc_per_node: int = Field(1, ge=1)
    """Processes per node: one per GPU."""
    slurm_cluster: Text = ""
    """Cluster to submit to, for sites with several (`sbatch -M`); several separated by commas."""
    slurm_partition: Text = ""
    """Partition, or several separated by commas."""
    slurm_account: Text = ""
    """Account to charge."""
    qos: Text = ""
    """Quality of service."""
    constraint: Text = ""
    """Required node features."""
    reservation: Text = ""
    """Reservation."""
    gpus_per_node: Text = ""
    """GPUs per node: 4, or h100:4."""
    gres: Text = ""
    """The same for sites that support only --gres: gpu:h100:4."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cuda: one GPU per process, or the start is refused; cpu: CPU cores, also of nodes with GPUs;
    auto: cuda if gpus_per_node or gres requests GPUs or a node shows some, else cpu.
    """
    runtime: int = Field(60, ge=1)
    """Time limit of a job in minutes; a longer training takes several jobs."""
    mem_mb: int = Field(0, ge=0)
    """Memory per node in MB of 2^20 bytes, as SLURM counts; 0 for all of it."""
    mem_mb_per_cpu: int = Field(0, ge=0)
    """Memory per CPU core in MB, for sites that refuse mem_mb; 0 for mem_mb."""
    mem_mb_per_gpu: int = Field(0, ge=0)
    """Memory per GPU in MB, for sites that refuse mem_mb; 0 for mem_mb."""
    cpus_per_task: int = Field(0, ge=0)
    """CPU cores per node; 0 for 2 per process, or with launcher local for all."""
    modules: Text = ""
    """Environment modules to load on every node, separated by spaces."""
    container: Text = ""
    """Apptainer image to run the processes in."""
    interface: Text = ""
    """Network interface between nodes, such as ib0."""
    setup: Text = ""
    """Shell command to run on the first node before the processes start in its environment."""
    sbatch_options: Text = ""
    """More sbatch options: `exclude=node7 exclusive`."""
    srun_options: Text = ""
    """More options of the srun that starts the processes: `mpi=none`."""
    save_within_s: int = Field(120, ge=1)
    """Seconds before the time limit at which the training saves and ends."""
    max_restarts: int = Field(2, ge=0)
    """Restarts per job after a process was lost, each from a newer checkpoint than the previous
    start.
    """
    max_jobs: int = Field(100, ge=1)
    """Maximum number of jobs of a training."""
    poll_s: float = Field(10.0, gt=0)
    """Seconds between two queries of the queue."""
    on_interrupt: Literal["cancel", "detach"] = "cancel"
    """Effect of Ctrl-C on the job: cancel it, or detach from it."""

    @property
    def node_counts(self) -> range:
        """Every number of nodes the run may get."""
        lowest, _, highest = self.nodes.partition("-")
        return range(int(lowest), int(highest or lowest) + 1)

    @property
    def cpus(self) -> int:
        return self.cpus_per_task or 2 * self.nproc_per_node

    @property
    def memory_key(self) -> str:
        """The key whose memory is requested: SLURM accepts only one."""
        return next((key for key in MEMORY if getattr(self, key)), "mem_mb")

    @property
    def memory_mb(self) -> int:
        return int(getattr(self, self.memory_key))

    @property
    def memory_units(self) -> int:
        """Units of a node, each with `memory_mb`: CPU cores, GPUs, or 1 for the node."""
        # without requested GPUs, each process is assumed to have one
        units = {"mem_mb_per_cpu": self.cpus, "mem_mb_per_gpu": self.gpus or self.nproc_per_node}
        return units.get(self.memory_key, 1)

    @property
    def node_memory_bytes(self) -> int:
        """Memory requested per node; 0 for all of it."""
        return self.memory_mb * self.memory_units * MB

    @property
    def memory_text(self) -> str:
        """Requested memory, such as `4000 MB per cpu`; empty for all of a node."""
        per_unit = self.memory_key.removeprefix("mem_mb").replace("_", " ")
        return f"{self.memory_mb} MB{per_unit}" if self.memory_mb else ""

    @property
    def gpus_by_type(self) -> dict[str, int]:
        by_type = "gpu:" + self.gpus_per_node.replace(",", ",gpu:")
        return gpus_in(by_type if self.gpus_per_node else self.gres)

    @property
    def gpus(self) -> int:
        return sum(self.gpus_by_type.values())

    @property
    def wanted_device(self) -> str:
        """cuda, cpu, or auto: whatever the nodes have."""
        return "cuda" if self.device == "auto" and self.gpus else self.device

    def problems(self) -> Iterator[str]:
        for key, value in self:
            if isinstance(value, str) and not value.isprintable():
                yield f"{key}: expected one line of printable text, got {value!r}"
        if not re.fullmatch(r"[1-9]\d{0,5}(-[1-9]\d{0,5})?", self.nodes) or not self.node_counts:
            quotes = (
                """; in a profile a range needs both quotes: "'2-4'\""""
                if self.nodes.startswith("-")
                else ""
            )
            yield f"nodes: expected a number such as 2 or a range such as 1-2, got {self.nodes!r}{quotes}"
        if len(self.node_counts) > 1 and self.launcher != "slurm":
            yield f"nodes: a range such as {self.nodes} requires launcher slurm, got {self.launcher}"
        if self.gpus_per_node and self.gres:
            yield f"gpus_per_node {self.gpus_per_node!r} and gres {self.gres!r} request GPUs twice; set one to ''"
        memory = [key for key in MEMORY if getattr(self, key)]
        if len(memory) > 1:
            yield f"{' and '.join(memory)} request memory twice, which SLURM refuses; set all but one to 0"
        for key, ours in (("sbatch_options", OURS), ("srun_options", OURS_OF_SRUN)):
            taken = options_in(getattr(self, key)).keys() & set(ours)
            if taken:
                yield f"{key}: {min(taken)!r} is set by cellmill and cannot be changed here"
        if self.launcher == "slurm" and 60 * self.runtime <= self.save_within_s:
            yield f"save_within_s {self.save_within_s} leaves no time in a runtime of {self.runtime} min; lower it"

    @property
    def srun_flags(self) -> list[str]:
        return flags(options_in(self.srun_options))
