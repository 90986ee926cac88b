"""The claim of a running job on its folder: never do two jobs work in one.

    FOLDER/claims/00000007.json     the job that claimed it; its modification time is when it last said that it lives

The claim with the highest number counts, and none is ever removed: a job that looked for the newest long ago could take
a number that others have passed. It is created with O_EXCL, which is atomic on NFS and Lustre too, where flock may be
missing or local to a node. Its job renews it every `RENEW_S` and marks it as released when it ends; a job that finds
another's claim waits until that is renewed, which proves that its job lives, or until it was silent for `LEASE_S`, and
then creates the next one. A job that was silent for so long itself finds the next claim when it wakes up, and ends.
Ages are differences of times of the file server, so clocks of nodes do not matter.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cellmill.errors import DataError
from cellmill.files import read_json, write_json

RENEW_S = 10.0
LEASE_S = 60.0
TICK_S = 1.0


class Claimed(Exception):
    """Another job has the folder."""


@dataclass
class Claim:
    """This job's claim on a folder."""

    file: Path
    job: str
    renewed: float = field(default_factory=time.monotonic)

    def renew(self) -> None:
        """Say that this job lives, if it is time to. Raises Claimed if another job has taken the folder over."""
        now = time.monotonic()
        if now - self.renewed < RENEW_S:
            return
        newest = _newest(self.file.parent)
        if newest is not None and newest != self.file:
            raise Claimed(f"job {holder(newest)} has taken over from job {self.job}, which was silent for too long")
        with suppress(OSError):  # a full disk or a server in trouble: the next one may succeed
            os.utime(self.file)
            self.renewed = now

    def release(self) -> None:
        """Let the next job have the folder at once."""
        with suppress(OSError):
            self.file.parent.stat()  # a deleted run is not made again
            write_json(self.file, {"job": self.job, "released": True})


def claim(folder: Path, job: str, wait: Callable[[float], None] = time.sleep) -> Claim:
    """Claim `folder` for the job `job`. Waits for at most `LEASE_S` after the last sign of life of another job.

    Raises Claimed if another job lives there.
    """
    claims = folder / "claims"
    claims.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        newest = _newest(claims)
        if newest is not None:
            _wait_until_silent(newest, job, wait)
        own = claims / f"{1 + (int(newest.stem) if newest else 0):08}.json"
        try:
            with open(own, "x", encoding="utf-8") as text:
                json.dump({"job": job, "released": False}, text)
        except FileExistsError:  # another job was faster
            continue
        return Claim(own, job)


def lives(folder: Path, job: str) -> bool | None:
    """True if the job that claimed `folder` last still renews its claim; None if that is not `job`."""
    newest = _newest(folder / "claims")
    if newest is None or holder(newest) != job:
        return None
    return living(folder) == job


def living(folder: Path) -> str:
    """The job that claimed `folder` last, if it still renews its claim; otherwise empty."""
    newest = _newest(folder / "claims")
    if newest is None or _released(newest) or (_silent_s(newest) or 0.0) >= LEASE_S:
        return ""
    return holder(newest)


def holder(file: Path) -> str:
    """The job of a claim, for messages."""
    try:
        return str(read_json(file)["job"])
    except (DataError, KeyError, TypeError):  # being written
        return "of another launcher"


def _wait_until_silent(newest: Path, job: str, wait: Callable[[float], None]) -> None:
    """Return once the claim is released or silent for `LEASE_S`. Raises Claimed if it is renewed."""
    first = _modified(newest)
    while not _released(newest):
        silent_s, modified = _silent_s(newest), _modified(newest)
        if silent_s is None or modified is None:  # removed: there is a newer one
            return
        if modified != first and not _released(newest):
            other, folder = holder(newest), newest.parent.parent
            if other == job:  # SLURM lost the node of its first start and requeued it
                raise Claimed(f"an earlier start of job {job} is training in {folder}; this start ends")
            raise Claimed(f"job {other} is training in {folder}; job {job} ends")
        if silent_s >= LEASE_S:
            return
        wait(TICK_S)


def _newest(claims: Path) -> Path | None:
    return max(claims.glob("[0-9]*.json"), key=lambda file: int(file.stem), default=None)


def _released(file: Path) -> bool:
    try:
        return bool(read_json(file)["released"])
    except (DataError, KeyError, TypeError):
        return False


def _modified(file: Path) -> int | None:
    """Modification time in ns; None if the file is gone. Opened, since a network file system then asks the server."""
    try:
        with open(file, encoding="utf-8") as opened:
            return os.fstat(opened.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _silent_s(file: Path) -> float | None:
    """Seconds since the claim was renewed, by the clock of the file server; None if it is gone."""
    modified = _modified(file)
    if modified is None:
        return None
    probe = file.with_name(f".now.{secrets.token_hex(4)}")
    try:
        probe.touch(exist_ok=False)
        return (probe.stat().st_mtime_ns - modified) / 1e9
    finally:
        probe.unlink(missing_ok=True)
