"""The machine a run is trained on: what a profile's `set-resources: train:` says and `cellmill train` takes as flags.

One name, three places: field here, resource of the rule, flag of the command line. Texts that reach a batch script
are held to the characters SLURM's own values are made of, so nothing in a profile can become a command.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from cellmill.config.section import Section

_PLAIN = re.compile(r"[\w.,:+=@/*&|()\[\]!%-]*", re.ASCII)


def _plain(value: str) -> str:
    if not _PLAIN.fullmatch(value):
        raise ValueError(
            f"{value!r} has a character that no SLURM value needs: letters, digits and . , : + = @ / * & | ( ) [ ] "
            "! % - _ are allowed"
        )
    return value


def _words(value: str) -> str:
    for word in value.split(" "):
        _plain(word)
    return value


def _one_line(value: str) -> str:
    if not value.isprintable():
        raise ValueError(f"{value!r}: one line of printable text is wanted")
    return value


# what the launcher itself sets: another value would lose the job or its log
_OURS = [
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "job-name",
    "output",
    "error",
    "open-mode",
    "signal",
    "requeue",
    "no-requeue",
    "array",
    "wrap",
    "parsable",
    "chdir",
    "export",
]


def _not_ours(value: str) -> str:
    for word in _words(value).split():
        name = word.removeprefix("--").partition("=")[0]
        if name in _OURS:
            raise ValueError(f"{name!r} is set by cellmill itself and cannot be changed here")
    return value


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Plain = Annotated[str, BeforeValidator(_text), AfterValidator(_plain)]
Words = Annotated[str, AfterValidator(_words)]
Line = Annotated[str, AfterValidator(_one_line)]


class Machine(Section):
    """How many processes a training has, and where they run."""

    launcher: Literal["local", "slurm", "allocation"] = Field(
        "local",
        description="local starts the processes on this machine; slurm submits jobs; allocation starts them in the "
        "salloc or sbatch job that cellmill itself runs in.",
    )
    nodes: Annotated[str, BeforeValidator(_text)] = Field(
        "1", description="Machines, such as 2; a range such as 1-2 also goes on with fewer."
    )
    nproc_per_node: int = Field(1, ge=1, description="Processes on each machine: one for each GPU.")
    slurm_partition: Plain = Field("", description="Partition, or several with commas.")
    slurm_account: Plain = Field("", description="Account that is charged.")
    qos: Plain = Field("", description="Quality of service.")
    constraint: Plain = Field("", description="Features the nodes must have.")
    reservation: Plain = Field("", description="Reservation to use.")
    gpus_per_node: Plain = Field("", description="GPUs of each node: 4, or h100:4.")
    gres: Plain = Field("", description="The same where a site knows --gres alone: gpu:h100:4.")
    runtime: int = Field(60, ge=1, description="Time limit of one job, in minutes; a longer training is several jobs.")
    mem_mb: int = Field(0, ge=0, description="Memory of each node, in MB; 0 is all of it.")
    cpus_per_task: int = Field(0, ge=0, description="CPU cores on each node; 0 is 2 for each process.")
    modules: Words = Field("", description="Environment modules to load on each node, separated by spaces.")
    container: Line = Field("", description="Apptainer image the processes run in.")
    interface: Plain = Field("", description="Network interface between nodes, such as ib0.")
    sbatch_options: Annotated[str, AfterValidator(_not_ours)] = Field(
        "", description="Further options of sbatch: `exclude=node7 exclusive`."
    )
    save_within_s: int = Field(
        120, ge=1, description="Seconds before the time limit at which a training saves and ends."
    )
    max_restarts: int = Field(
        2,
        ge=0,
        description="How often one job starts its processes again, from the last checkpoint, after one was lost; not "
        "when the start before went on from the same step.",
    )
    max_jobs: int = Field(100, ge=1, description="Most jobs one training is cut into.")
    poll_s: float = Field(10.0, gt=0, description="Seconds between two looks at the queue.")
    on_interrupt: Literal["cancel", "detach"] = Field(
        "cancel", description="What Ctrl-C does to the job: cancel it, or leave it running."
    )

    @property
    def node_counts(self) -> range:
        """Every number of nodes the run may get."""
        fewest, _, most = self.nodes.partition("-")
        return range(int(fewest), int(most or fewest) + 1)

    @property
    def cpus(self) -> int:
        """CPU cores asked for on each node."""
        return self.cpus_per_task or 2 * self.nproc_per_node

    @property
    def gpus(self) -> int:
        """GPUs asked for on each node."""
        asked = re.sub(r"\([^)]*\)", "", (self.gpus_per_node and f"gpu:{self.gpus_per_node}") or self.gres)
        parts = [part.split(":") for part in asked.split(",") if part.split(":")[0] == "gpu"]
        return sum(int(part[-1]) if part[-1].isdigit() else 1 for part in parts)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if not re.fullmatch(r"[1-9]\d{0,5}(-[1-9]\d{0,5})?", self.nodes) or not self.node_counts:
            quotes = """; in a profile a range has both quotes: "'2-4'\"""" if self.nodes.startswith("-") else ""
            raise ValueError(f"nodes: a number such as 2 or a range such as 1-2 is wanted, not {self.nodes!r}{quotes}")
        if len(self.node_counts) > 1 and self.launcher != "slurm":
            raise ValueError(f"nodes: a range such as {self.nodes} needs launcher slurm, not {self.launcher}")
        if self.gpus_per_node and self.gres:
            raise ValueError(f"gpus_per_node {self.gpus_per_node!r} and gres {self.gres!r} ask twice; set one to ''")
        if self.launcher == "slurm" and 60 * self.runtime <= self.save_within_s:
            raise ValueError(
                f"save_within_s {self.save_within_s} leaves nothing of a runtime of {self.runtime} min; lower it"
            )
        return self

    def options(self) -> dict[str, str | bool]:
        """`sbatch_options` by name; those without a value are True."""
        pairs = [word.removeprefix("--").partition("=") for word in self.sbatch_options.split()]
        return {name: value if equals else True for name, equals, value in pairs}
