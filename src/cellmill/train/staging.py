"""Copies of a run's shards on the own disk of each node (`stream.stage_to`), made while it trains."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cellmill.config.run import Stream
from cellmill.data.copy_shards import CopyTask
from cellmill.data.local_copies import PREFIX, LocalCopies, warn
from cellmill.data.stream import CellStream
from cellmill.parallel.gather_json import gather_json
from cellmill.parallel.mesh import Mesh

_END_S = 60  # for removing the copies


class Staging:
    """The folder of copies of this node, and on the first rank of a node the process that fills it.

    Attributes: `copies`, for the streams of this rank; None if `stage_to` is null, or names a variable that the node
    does not have.
    """

    def __init__(self, options: Stream, mesh: Mesh):
        """Agree on a new folder. Collective: every rank, of which those of a node share one."""
        self.copies: LocalCopies | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._limit_gb = options.stage_limit_gb
        if options.stage_to is None:
            return
        node, parent = int(os.environ.get("GROUP_RANK", 0)), os.path.expandvars(options.stage_to)
        ranks = gather_json([node, secrets.token_hex(4), mesh.dp_rank], mesh.device)
        self._node, self._n_nodes = node, 1 + max(other for other, _, _ in ranks)
        self._data_ranks = {rank for other, _, rank in ranks if other == node}
        token = next(token for other, token, _ in ranks if other == node)
        self._first_of_node = int(os.environ.get("LOCAL_RANK", 0)) == 0
        if "$" in parent or not os.path.isabs(parent):
            if self._first_of_node:
                warn(
                    f"stream.stage_to is {options.stage_to!r}, here {parent!r}: expected an absolute path of variables "
                    "that the node has; shards are read from the shared folder"
                )
            return
        self.copies = LocalCopies(Path(parent) / f"{PREFIX}{token}-{node}")

    def start(self, streams: Sequence[CellStream | None], step: int, stop: int) -> None:
        """Begin to copy what the ranks of this node read of `streams` in the training's steps `step` to `stop`."""
        if self.copies is None or not self._first_of_node:
            return
        shards = {
            str(path): sha256
            for stream in streams
            if stream is not None
            for path, sha256 in stream.shards_read(self._data_ranks, step, stop).items()
        }
        names = list(shards)
        # nodes begin at different shards, so that not all of them read the same file at once
        first = self._node * len(names) // self._n_nodes
        ordered = {name: shards[name] for name in names[first:] + names[:first]}
        limit = None if self._limit_gb is None else self._limit_gb * 1e9
        command = [sys.executable, "-m", "cellmill.data.copy_shards"]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            assert self._process.stdin is not None
            self._process.stdin.write(CopyTask(str(self.copies.folder), ordered, limit).line())
            self._process.stdin.flush()
        except OSError as error:
            warn(f"stream.stage_to: {error.strerror}; shards are read from the shared folder")

    def close(self) -> None:
        """Remove the copies. Every rank's streams are closed."""
        process = self._process
        if process is None or self.copies is None:
            return
        if (code := process.poll()) is not None:
            warn(f"stream.stage_to: the process that copies shards ended with exit code {code} before the training")
        with suppress(OSError, subprocess.TimeoutExpired):
            process.communicate(timeout=_END_S)
        if process.poll() is None:
            process.kill()
        self.copies.remove()
