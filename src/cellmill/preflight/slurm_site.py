"""What a SLURM site offers, asked without queueing anything: partitions and nodes, accounts, an estimate of the start.

Every value goes to SLURM's commands as one argument of a list. An answer that makes no sense is a SiteError: nothing
is concluded from it.
"""

from __future__ import annotations

import getpass
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cellmill.config.machine import Machine
from cellmill.launch.submit import TRANSIENT, batch_executor, outside_any_job

ANSWER_WITHIN_S = 60
_DOWN = {"down", "drain", "drained", "draining", "fail", "failing", "future", "maint", "unknown", "error", "blocked"}


class SiteError(Exception):
    """A command of SLURM is not there, failed, or answered with what cannot be read."""


class Refused(Exception):
    """SLURM would not take the job; says why."""


@dataclass(frozen=True)
class Node:
    """One node of one partition."""

    name: str
    state: str
    gpus: dict[str, int]
    """GPUs of each type; "" for those without one."""
    cpus: int
    memory_mb: int
    features: frozenset[str]

    @property
    def up(self) -> bool:
        """Whether jobs may be placed on it, now or when others have ended."""
        # flags follow the word: * does not respond; ~ and # are asleep and wake for a job
        return self.state.rstrip("*~#!%$@^+-").lower() not in _DOWN and "*" not in self.state

    def gpus_of(self, kind: str) -> int:
        """GPUs of a type; of all types when it is ""."""
        return sum(number for name, number in self.gpus.items() if kind in ("", name))


@dataclass(frozen=True)
class Partition:
    """One partition."""

    name: str
    default: bool
    state: str
    """up, or what else sinfo says."""
    limit_min: int | None
    """Time limit; None without one."""
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Association:
    """An account this user may charge, and the QOS it has there."""

    account: str
    partition: str
    qos: frozenset[str]


def partitions() -> dict[str, Partition]:
    """Every partition this user may see, by name. Raises SiteError."""
    answer = ask(["sinfo", "-h", "-a", "-N", "-o", "%N|%P|%a|%l|%T|%c|%m|%G|%f"])
    found: dict[str, Partition] = {}
    for line in answer.splitlines():
        cells = [cell.strip() for cell in line.split("|", 8)]
        if len(cells) != 9 or not re.fullmatch(r"\d+\+?", cells[5]) or not re.fullmatch(r"\d+\+?", cells[6]):
            raise SiteError(f"sinfo answered {line.strip()[:80]!r}")
        name = cells[1].removesuffix("*")
        node = Node(
            name=cells[0],
            state=cells[4],
            gpus=_gpus(cells[7]),
            cpus=int(cells[5].rstrip("+")),
            memory_mb=int(cells[6].rstrip("+")),
            features=frozenset(cells[8].split(",")) - {"(null)", ""},
        )
        before = found.get(name)
        nodes = (*before.nodes, node) if before else (node,)
        found[name] = Partition(name, cells[1].endswith("*"), cells[2], minutes(cells[3]), nodes)
    return found


def associations() -> list[Association]:
    """What this user may charge; empty where the accounting has no rules for it. Raises SiteError."""
    fields = "format=Account,Partition,QOS"
    answer = ask(["sacctmgr", "-n", "-P", "show", "assoc", f"user={getpass.getuser()}", fields])
    rows = [line.split("|") for line in answer.splitlines() if line.strip()]
    if any(len(row) != 3 for row in rows):
        raise SiteError(f"sacctmgr answered {answer.strip()[:80]!r}")
    return [Association(row[0], row[1], frozenset(row[2].split(",")) - {""}) for row in rows]


def accounting() -> None:
    """Raises SiteError when sacct has no accounting to read."""
    ask(["sacct", "-n", "-X", "-P", "-S", "now", "-o", "JobID"])


def estimate(machine: Machine) -> str:
    """When and where SLURM expects to start a job of this machine (`sbatch --test-only`).

    The batch script asks for what a training's would. Raises Refused with SLURM's words, SiteError without an answer.
    """
    with tempfile.TemporaryDirectory(prefix="cellmill-") as name, outside_any_job():
        executor = batch_executor(machine, Path(name), "cellmill-preflight")
        script = Path(name) / "test.sh"
        script.write_text(executor._make_submission_file_text("true", "preflight"), encoding="utf-8")
        done = _run(["sbatch", "--test-only", str(script)])
    said = " ".join(line.removeprefix("sbatch: ") for line in done.stderr.splitlines() if line.strip())
    if done.returncode == 0:
        match = re.search(r"to start at (\S+).*?(?: on nodes? (\S+))?(?: in partition|$)", said)
        if match is None:
            raise SiteError(f"sbatch --test-only answered {said[:80]!r}")
        return f"{match[1].replace('T', ' ')}{f' on {match[2]}' if match[2] else ''}"
    if TRANSIENT.search(said):
        raise SiteError(f"sbatch --test-only: {said[:200]}")
    raise Refused(said.replace("error: ", "")[:300])


def hostnames(nodes: str) -> list[str]:
    """The names in SLURM's `node[1-2]`. Raises SiteError."""
    return ask(["scontrol", "show", "hostnames", nodes]).split()


def minutes(text: str) -> int | None:
    """SLURM's `days-hours:minutes:seconds`, `hours:minutes:seconds` or `minutes:seconds`; None for no limit."""
    if text in ("infinite", "UNLIMITED", "n/a"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        raise SiteError(f"sinfo gives the time limit {text[:40]!r}")
    days, hours, mins, seconds = (int(part or 0) for part in match.groups())
    return (24 * days + hours) * 60 + mins + seconds // 60


def _gpus(gres: str) -> dict[str, int]:
    """`gpu:a100:4(S:0-1),gpu:2,nvme:1` as {"a100": 4, "": 2}."""
    found: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        match = re.fullmatch(r"gpu(?::([^:]+?))??(?::(\d+))?", part.strip())
        if match:
            found[match[1] or ""] = found.get(match[1] or "", 0) + int(match[2] or 1)
    return found


def ask(command: list[str]) -> str:
    """What a command prints. Raises SiteError when it is not there, fails or is silent for too long."""
    done = _run(command)
    if done.returncode:
        said = " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"
        raise SiteError(f"{command[0]}: {said.removeprefix(f'{command[0]}: ')}")
    return done.stdout


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ANSWER_WITHIN_S, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise SiteError(f"{command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise SiteError(f"{command[0]}: no answer within {ANSWER_WITHIN_S} s") from None
