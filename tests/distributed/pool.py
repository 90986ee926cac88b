"""Four real processes in one gloo group, started once for all distributed tests.

A test hands a function of `cases.py`, or of a module beside it, by name to every rank and gets each rank's result, or
the first traceback.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import traceback
from multiprocessing.connection import Connection
from typing import Any


class Pool:
    """`world` processes that wait for work; `run` is the only thing to call."""

    def __init__(self, world: int, local_world: int) -> None:
        context = multiprocessing.get_context("spawn")
        rendezvous = tempfile.mktemp(prefix="cellmill-pool-")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, local_world, rendezvous, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, case: str, **arguments: Any) -> list[Any]:
        """Results of `cases.<case>(**arguments)` by rank, or of `<module>.<case>`. Raises AssertionError with a rank's
        traceback."""
        for pipe in self.pipes:
            pipe.send((case, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(180), f"rank {rank} did not answer {case} within 180 s"
            answers.append(pipe.recv())
        for rank, (ok, answer) in enumerate(answers):
            assert ok, f"rank {rank} in {case}:\n{answer}"
        return [answer for _, answer in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()


def _serve(rank: int, world: int, local_world: int, rendezvous: str, pipe: Connection) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_RANK": str(rank % local_world), "LOCAL_WORLD_SIZE": str(local_world)}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    while (work := pipe.recv()) is not None:
        case, arguments = work
        try:
            module, _, name = case.rpartition(".")
            found = importlib.import_module(f"tests.distributed.{module or 'cases'}")
            answer = True, getattr(found, name)(**arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
    dist.destroy_process_group()
