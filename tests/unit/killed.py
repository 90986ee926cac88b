"""A stage in a process that kill -9 ends after a number of steps, and that is run again."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("fork")  # a process without imports of its own
NEVER = -1


class Steps:
    """Counts the steps of a stage; kill -9 of this process in place of step `killed_after`."""

    def __init__(self, killed_after: int) -> None:
        self.counted = 0
        self._killed_after = killed_after

    def take(self, step: Callable[..., Any], *given: Any) -> Any:
        """Result of a step, which counts once it is done."""
        if self.counted == self._killed_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = step(*given)
        self.counted += 1
        return result

    def write(self, out: Path) -> None:
        """Write the number of steps next to the output of the stage."""
        out.with_suffix(".counted").write_text(str(self.counted))


def run_in_process(stage: Callable[..., None], out: Path, *given: Any) -> int | None:
    """Number of steps of `stage`, which writes it by `Steps`; None if it was killed."""
    process = FORK.Process(target=stage, args=given)
    process.start()
    process.join(120)
    if process.exitcode == -signal.SIGKILL:
        return None
    assert process.exitcode == 0
    return int(out.with_suffix(".counted").read_text())


def run_two(stage: Callable[..., None], *given: Any) -> None:
    """Run `stage` in two processes at once; both must end well."""
    processes = [FORK.Process(target=stage, args=given) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0


def run_to_the_end(
    run_stage: Callable[[int], int | None], out: Path, killed_after: Iterable[int]
) -> int:
    """Number of steps of all processes: one is killed after each of these numbers, the last one ends
    the stage.
    """
    counted = 0
    for n in killed_after:
        assert run_stage(n) is None
        assert not out.exists()
        counted += n
    rest = run_stage(NEVER)
    assert rest is not None
    return counted + rest
