"""Four real processes in one gloo group, started once for all distributed tests.

A test hands a function of `cases.py`, or of a module beside it, by name to every rank and gets each
rank's result, or the first traceback.
"""

import functools
import gc
import importlib
import multiprocessing
import os
import tempfile
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

IMPORTED = [
    "anndata",
    "tests.distributed.conformance",
    "cellmill.data.stream.builtin_tokenizers",
    "cellmill.models.families.encoder",
    "cellmill.models.objectives.cell_decoding",
    "cellmill.models.objectives.masked_value",
]
"""Modules of the process that the pool is forked from; imported in each of the four, they took most
of the time.
"""
FORGET_THREADS = 120  # torch's caches are emptied above it
# gloo's, of groups that torch still knows after their world has ended; a hundred take 3 % of a core
MAX_THREADS = 160


class Pool:
    """`world` processes that wait for work; call only `run`. They are replaced after a failure."""

    def __init__(self, world: int, local_world: int) -> None:
        self.world = world
        self.local_world = local_world
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []

    def run(self, case: str, **arguments: Any) -> list[Any]:
        """Results of `cases.<case>(**arguments)` by rank, or of `<module>.<case>`. Raises
        AssertionError with a rank's traceback.
        """
        if self._threads() > MAX_THREADS:
            self.close()
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((case, arguments))
        answers: dict[int, Any] = {}
        failed: dict[int, str] = {}
        waiting = dict(zip(self.pipes, range(self.world)))
        within_s = 500.0
        while waiting and (ready := wait(list(waiting), within_s)):
            for pipe in ready:
                rank = waiting.pop(pipe)
                ok, answer = pipe.recv()
                (answers if ok else failed)[rank] = answer
            # the others may wait for the failed rank forever
            within_s = 20.0 if failed else within_s
        if waiting or failed:
            self.close()
        for rank, text in sorted(failed.items()):
            if torch.__version__ < "2.12" and "requires torch 2.12" in text:
                # the reason: a schedule that an older torch has on GPUs alone
                pytest.skip(text.splitlines()[-1])
            raise AssertionError(f"rank {rank} in {case}:\n{text}")
        assert not waiting, (
            f"ranks {sorted(waiting.values())} did not answer {case} within {within_s:g} s"
        )
        return [answers[rank] for rank in range(self.world)]

    def _threads(self) -> int:
        return max(
            (
                len(list(Path(f"/proc/{p.pid}/task").iterdir()))
                for p in self.processes
                if p.is_alive()
            ),
            default=0,
        )

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        if self.processes:
            self.folder.cleanup()
        self.pipes = []
        self.processes = []

    def _start(self) -> None:
        multiprocessing.set_forkserver_preload(IMPORTED)
        context = multiprocessing.get_context("forkserver")
        self.folder = tempfile.TemporaryDirectory(prefix="cellmill-pool-")
        rendezvous = f"{self.folder.name}/store"
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.world, self.local_world, rendezvous, theirs),
                daemon=True,
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)


def _forget() -> None:
    """Empty torch's caches: they hold the meshes of the ended case, whose groups have threads of
    gloo that poll.
    """
    _clear_sharding_prop_cache()
    getattr(_redistribute, "clear_redistribute_planner_cache", gc.collect)()  # torch 2.11 has none
    for cache in gc.get_objects():
        if type(cache) is functools._lru_cache_wrapper and cache.__module__.startswith(
            "torch.distributed"
        ):
            cache.cache_clear()
    gc.collect()


def _serve(rank: int, world: int, local_world: int, rendezvous: str, pipe: Connection) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_RANK": str(rank % local_world), "LOCAL_WORLD_SIZE": str(local_world)}
    torch.set_num_threads(1)
    number = 0
    while (work := pipe.recv()) is not None:
        case, arguments = work
        # a world for each case, or the groups of meshes and their gloo threads would accumulate.
        # The previous world is destroyed here, when all ranks are done with it
        if dist.is_initialized():
            if len(os.listdir("/proc/self/task")) > FORGET_THREADS:
                _forget()
            dist.destroy_process_group()
        number += 1
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}-{number}", rank=rank, world_size=world
        )
        try:
            module, _, name = case.rpartition(".")
            found = importlib.import_module(f"tests.distributed.{module or 'cases'}")
            answer = True, getattr(found, name)(**arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
