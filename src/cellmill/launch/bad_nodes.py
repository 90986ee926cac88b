"""Nodes that failed a training, and which of them the next job excludes.

    RESULTS/bad_nodes/NODE.json     when the node failed, and why

SLURM would choose such a node again, job after job. The runs of a results folder share the list.
An entry counts for `KEPT_S`; `cellmill preflight --node NODE` tests the node and removes it.
"""

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cellmill.errors import DataError
from cellmill.files import read_json, span, write_json
from cellmill.launch.follow import Tail
from cellmill.runs.jobs import CONNECTION, JobRecord, error_line

KEPT_S = 3 * 86400
NODES_PER_EXCLUDED = 4  # at most one of this many nodes of a partition is excluded
HOW_TO_LIFT = "`cellmill preflight --profile PROFILE --node NODE` tests one and lifts this"
NodeStates = Callable[[], Mapping[str, str]]
"""Returns SLURM's states of a partition's nodes by name."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_DOWN = re.compile(r"down|drain|fail|unk|\*", re.IGNORECASE)
# torch aborts all ranks of a broken collective, and agents end their workers
_NOT_A_CAUSE = "(?!SIGABRT|SIGTERM)"
_LINES = [
    re.compile(pattern)
    for pattern in (
        r"rank \d+ on (\S+)(?: and \d+ more \(.*?\))? (?:has been|is|are) stuck at",
        r"rank \d+ on (\S+)(?: and \d+ more \(.*?\))? do(?:es)? not respond",
        r"rank \d+ on (\S+): its (?:GPU \S+|CPU) failed",
        rf"rank \d+ on (\S+) ended with signal {_NOT_A_CAUSE}",
        r"\d+ of \d+ nodes have not joined: ([^;…]+)[;…]",
        r"srun: error: [Tt]ask launch for \S+ failed on node (\S+):",
    )
]
"""Lines that name the node, or nodes, that caused the end of a job."""


@dataclass(frozen=True)
class BadNode:
    name: str
    failed_at: float  # seconds since 1970
    why: str

    @property
    def text(self) -> str:
        return f"{self.name} ({span(max(0.0, time.time() - self.failed_at))} ago: {self.why})"


class BadNodes:
    """The list of a results folder."""

    def __init__(self, results: Path) -> None:
        self.path = results / "bad_nodes"

    @classmethod
    def of_run(cls, train: Path) -> "BadNodes":
        """The list for a training in `train`: its own if it is not in a results folder."""
        path = train.resolve()
        return cls(path.parents[2] if path.parents[1].name == "runs" else path)

    def all(self) -> list[BadNode]:
        """Nodes that failed within `KEPT_S`, the latest first."""
        nodes = []
        for file in self.path.glob("*.json"):
            # removed meanwhile, or damaged; names become arguments of sbatch
            with suppress(DataError, KeyError, TypeError, ValueError):
                entry = read_json(file)
                node = BadNode(file.stem, float(entry["failed_at"]), str(entry["why"]))
                if _NAME.fullmatch(node.name) and time.time() - node.failed_at < KEPT_S:
                    nodes.append(node)
        return sorted(nodes, key=lambda node: -node.failed_at)

    def add(self, name: str, why: str) -> None:
        """Add a node, or renew its entry."""
        node = BadNode(name, time.time(), why)
        with suppress(OSError):  # a full disk, or another user's folder: SLURM may choose it again
            self.path.mkdir(exist_ok=True)
            write_json(self.path / f"{name}.json", asdict(node))

    def lift(self, name: str) -> None:
        """Remove a node from the list."""
        (self.path / f"{name}.json").unlink(missing_ok=True)

    def excluded(self, states: NodeStates, fewest: int) -> list[str]:
        """Nodes that a job of at least `fewest` nodes excludes, the latest first.

        They are at most a quarter of the partition, and leave at least `fewest` nodes that are up.
        """
        nodes = self.all()
        if not nodes:
            return []
        partition = states()
        left = {name for name, state in partition.items() if not _DOWN.search(state)}
        excluded: list[str] = []
        for name in (node.name for node in nodes if node.name in partition):
            is_full = len(excluded) == len(partition) // NODES_PER_EXCLUDED
            is_needed = name in left and len(left) <= fewest
            if not is_full and not is_needed:
                excluded.append(name)
                left.discard(name)
        return excluded


def blamed(ended: JobRecord, states: NodeStates) -> dict[str, str]:
    """Nodes that caused the end of a job, with the line that names each.

    Empty if more than half of several nodes are named: then the cause is elsewhere.
    """
    hosts: list[str] = []
    with suppress(DataError):
        for attempt in ended.attempts()[-1:]:
            hosts = attempt["hosts"]
    if ended.state == "NODE_FAIL":
        down = hosts
        if len(hosts) > 1:
            down = [name for name, state in states().items() if _DOWN.search(state)]
        return {name: "NODE_FAIL" for name in hosts if name in down}
    lines = [ended.late]
    if ended.state == "LAUNCH_FAILED":
        lines.append(Tail(ended.log).last(Tail.FAILED_LAUNCH))
    if ended.state == "FAILED":
        lines += [ended.error, error_line(ended.path, CONNECTION)]
        logs = sorted(ended.path.glob(f"{ended.job_id}_*_log.out"))
        lines += [Tail(log).last(Tail.KILLED) for log in logs]
    nodes: dict[str, str] = {}
    for line in filter(None, lines):
        for pattern in _LINES:
            match = pattern.match(line)
            if match:
                nodes |= dict.fromkeys(
                    filter(_NAME.fullmatch, re.split(", *", match[1].strip())), line
                )
    return nodes if len(nodes) <= max(1, len(hosts) // 2) else {}
