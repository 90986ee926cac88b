"""Random faults on runs of two nodes, drawn by a seed: places, times, and kinds, each once before
one comes again.

Whatever happens to it, a run is started again with the same command until it is done. Its loss
curve has to be that of an undisturbed run, no two of its jobs may ever have processes at the same
time, and nothing of it may be left.

    python -m tests.cluster.rig start
    python -m tests.cluster.random_faults CORPUS --faults 100 --seed 1

Two runs at a time, on the partitions gpu-a100 and gpu-h100, with `EACH` faults each.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.launched import Launched, cellmill, on_slurm, run_options, wrapper
from tests.cluster.rig import Rig
from tests.cluster.serve import ServedRig
from tests.distributed.command import pids_with, wait_for

STEPS = 60
EACH = 4
PARTITIONS = {"gpu-a100": ("a100", ("node1", "node2")), "gpu-h100": ("h100", ("node3", "node4"))}
CONTROLLER = threading.Lock()
EMPTY = """if [ -e "$0.empty" ]; then exit 0; fi
exec "$REAL" "$@"
"""
LOST = """if [ -e "$0.lost" ]; then
    rm -f "$0.lost"; "$REAL" "$@" > /dev/null
    echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1
fi
exec "$REAL" "$@"
"""


@dataclass
class FaultyRun:
    """One run on a partition, its launcher, and what was seen of it."""

    rig: Rig
    corpus: str
    folder: Path
    partition: str
    draw: random.Random
    kinds: list[Callable[["FaultyRun"], None]]  # of its faults, the last one first
    done: list[str] = field(default_factory=list)
    """What was done to it, in order."""
    most_jobs: int = 0
    """Most jobs of this run that had processes at one moment."""

    def __post_init__(self) -> None:
        self.kind, self.nodes = PARTITIONS[self.partition]
        self.name = self.folder.name
        self.results = self.folder / "results"
        self.train = self.results / "runs" / self.name / "train"
        self.bin = self.folder / "bin"
        for name, script in (("squeue", EMPTY), ("sbatch", LOST)):
            self.path = wrapper(self.bin, name, script)
        self.launched: Launched | None = None
        self._ended = threading.Event()

    def run(self) -> dict[int, float]:
        """Train to the end through its faults; return the curve."""
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            times = sorted(self.draw.randint(0, STEPS - 10) for _ in self.kinds)
            for at in times:
                self._start()
                wait_for(lambda at=at: self._has_reached(at), self._printed)
                self._disturb(at)
            code = None
            while code != 0:
                self._start()
                code = self._launcher().end(900)
                given_up = (
                    "jobs in a row ended without a new checkpoint" in self._launcher().last_line
                )
                assert code in (0, 75, -signal.SIGKILL) or given_up, self._printed()
        finally:
            self._ended.set()
            watcher.join()
        wait_for(lambda: not self.processes(), lambda: str(self.processes()), 60)
        wait_for(lambda: not self.jobs(), lambda: str(self.rig.squeue()), 60)
        return self._launcher().losses()

    def _disturb(self, at: int) -> None:
        kind = self.kinds.pop()
        self.done.append(f"{kind.__name__} at step {at}")
        time.sleep(self.draw.uniform(0, 2))
        kind(self)

    def _start(self) -> None:
        """Start a launcher unless one is running."""
        if self.launched is not None and self.launched.process.poll() is None:
            return
        machine = on_slurm(
            nproc_per_node=1,
            slurm_partition=self.partition,
            gpus_per_node=f"{self.kind}:1",
            mem_mb=1500,
            cpus_per_task=2,
            runtime=30,
        )
        environment = self.rig.environment | self.path
        self.launched = Launched.start(
            self.corpus, self.train, run_options(STEPS), environment, **machine
        )

    def _launcher(self) -> Launched:
        assert self.launched is not None
        return self.launched

    def _has_reached(self, step: int) -> bool:
        launched = self._launcher()
        return launched.process.poll() is not None or bool(
            self.processes() and launched.step() >= step
        )

    def _printed(self) -> str:
        return f"{self.done}\n{self._launcher().printed}"

    def jobs(self) -> list[str]:
        """Ids of its jobs in the queue."""
        return [line.split()[0] for line in self.rig.squeue() if f" {self.name}." in line]

    def processes(self) -> dict[int, str]:
        """Its workers by pid, with the job that each belongs to."""
        pids = pids_with(str(self.train), "-m cellmill.train.worker")
        return {pid: environment_of(pid).get("SLURM_JOB_ID", "") for pid in pids}

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            self.most_jobs = max(self.most_jobs, len(set(self.processes().values()) - {""}))


def environment_of(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def stop_for_a_while(run: FaultyRun, pids: list[int], max_s: float) -> None:
    """Stop one of the processes, if there are any, for 1 to `max_s` seconds."""
    if pids:
        pid = run.draw.choice(pids)
        kill(pid, signal.SIGSTOP)
        time.sleep(run.draw.uniform(1, max_s))
        kill(pid, signal.SIGCONT)


def kill_a_worker(run: FaultyRun) -> None:
    workers = sorted(run.processes())
    if workers:
        kill(run.draw.choice(workers))


def kill_an_agent(run: FaultyRun) -> None:
    agents = pids_with(str(run.train), "cellmill.launch.agent")
    if agents:
        kill(run.draw.choice(agents))


def stop_a_worker_for_a_while(run: FaultyRun) -> None:
    stop_for_a_while(run, sorted(run.processes()), 10)


def kill_the_launcher(run: FaultyRun) -> None:
    run._launcher().process.kill()
    run._launcher().process.wait()


def close_the_terminal(run: FaultyRun) -> None:
    signal_launcher(run, signal.SIGHUP)


def interrupt(run: FaultyRun) -> None:
    signal_launcher(run, signal.SIGINT)
    run._launcher().end()


def cancel(run: FaultyRun) -> None:
    cellmill(run.rig, "cancel", run.name, "--results", str(run.results))


def cancel_as_somebody_else(run: FaultyRun) -> None:
    for job in run.jobs():
        run.rig.call("scancel", job, check=False)


def requeue(run: FaultyRun) -> None:
    for job in run.jobs():
        run.rig.call("scontrol", "requeue", job, check=False)


def reach_the_time_limit(run: FaultyRun) -> None:
    for job in run.jobs():
        run.rig.call("scontrol", "update", f"jobid={job}", "timelimit=1", check=False)


def kill_node(run: FaultyRun) -> None:
    node = run.draw.choice(run.nodes)
    run.rig.kill_node(node)
    time.sleep(run.draw.uniform(0, 5))
    run.rig.start_node(node)


def empty_the_queue(run: FaultyRun) -> None:
    """squeue answers with an empty list and no error for a while."""
    flag = run.bin / "squeue.empty"
    flag.touch()
    time.sleep(run.draw.uniform(2, 15))
    flag.unlink()


def stop_the_controller(run: FaultyRun) -> None:
    with CONTROLLER:
        run.rig.stop_controller()
        time.sleep(run.draw.uniform(2, 15))
        run.rig.start_controller()


def lose_the_answer_of_sbatch(run: FaultyRun) -> None:
    """The next job is accepted, and nobody hears of it; this one is lost."""
    (run.bin / "sbatch.lost").touch()
    kill_a_worker(run)


def kill_srun(run: FaultyRun) -> None:
    """The task step of its job."""
    for pid in pids_with("cellmill.launch.agent", "srun"):
        if run.name in environment_of(pid).get("SLURM_JOB_NAME", ""):
            kill(pid)


def stop_an_agent_for_a_while(run: FaultyRun) -> None:
    stop_for_a_while(run, pids_with(str(run.train), "cellmill.launch.agent"), 20)


def kill_all_by_scancel(run: FaultyRun) -> None:
    for job in run.jobs():
        run.rig.call("scancel", "--signal=KILL", "--full", job, check=False)


def requeue_and_hold_for_a_while(run: FaultyRun) -> None:
    for job in run.jobs():
        run.rig.call("scontrol", "requeuehold", job, check=False)
        time.sleep(run.draw.uniform(2, 15))
        run.rig.call("scontrol", "release", job, check=False)


def delete_its_checkpoints(run: FaultyRun) -> None:
    """All of them, and a process with them."""
    for folder in (run.train / "checkpoints").glob("*"):
        shutil.rmtree(folder, ignore_errors=True)
    kill_a_worker(run)


def delete_its_logs(run: FaultyRun) -> None:
    for log in (run.train / "jobs").glob("*/*_log.out"):
        log.unlink()


def tear_its_metrics(run: FaultyRun) -> None:
    """Half a line at the end, as a full disk leaves it."""
    for file in run.train.glob("metrics.jsonl"):
        with file.open("a") as metrics:
            metrics.write('{"step": 99, "lo')
    kill_a_worker(run)


def damage_the_newest_checkpoint(run: FaultyRun) -> None:
    """One byte of its tensors, while no process uses it."""
    interrupt(run)
    files = sorted((run.train / "checkpoints").glob("step-????????/*.distcp"))
    if len({file.parent for file in files}) > 1:
        content = bytearray(files[-1].read_bytes())
        content[run.draw.randrange(len(content))] ^= 1
        files[-1].write_bytes(content)


def signal_launcher(run: FaultyRun, number: signal.Signals) -> None:
    process = run._launcher().process
    if process.poll() is None:
        os.killpg(process.pid, number)


FAULTS: list[Callable[[FaultyRun], None]] = [
    kill_a_worker,
    kill_an_agent,
    stop_a_worker_for_a_while,
    kill_the_launcher,
    close_the_terminal,
    interrupt,
    cancel,
    cancel_as_somebody_else,
    requeue,
    reach_the_time_limit,
    kill_node,
    empty_the_queue,
    stop_the_controller,
    lose_the_answer_of_sbatch,
    damage_the_newest_checkpoint,
    kill_srun,
    stop_an_agent_for_a_while,
    kill_all_by_scancel,
    requeue_and_hold_for_a_while,
    delete_its_checkpoints,
    delete_its_logs,
    tear_its_metrics,
]


def undisturbed(corpus: str, folder: Path) -> dict[int, float]:
    """The curve of the same run on one machine."""
    run = Launched.start(
        corpus, folder / "train", run_options(STEPS), {}, rest_s=0, nodes=2, nproc_per_node=1
    )
    assert run.end() == 0, run.printed
    return run.losses()


def run_all(rig: Rig, corpus: str, folder: Path, faults: int, seed: int) -> list[FaultyRun]:
    """Make so many faults, one run after another in each partition. Raises AssertionError at the
    first difference.
    """
    expected = undisturbed(corpus, folder / "undisturbed")
    numbers = iter(range(-(-faults // EACH)))
    runs = []
    deck = random.Random(seed)
    kinds = [
        kind for _ in range(-(-faults // len(FAULTS))) for kind in deck.sample(FAULTS, len(FAULTS))
    ][:faults]
    lock = threading.Lock()

    def work(partition: str) -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            draw = random.Random(f"{seed}/{number}")
            own = kinds[number * EACH : (number + 1) * EACH]
            run = FaultyRun(rig, corpus, folder / f"run{number:03}", partition, draw, own)
            curve = run.run()
            print(f"{run.name}: {'; '.join(run.done)}", flush=True)
            assert curve == expected, f"{run.name}: {run.done}: another curve"
            assert run.most_jobs == 1, (
                f"{run.name}: {run.done}: {run.most_jobs} jobs trained at the same time"
            )
            runs.append(run)

    with ThreadPoolExecutor(len(PARTITIONS)) as pool:
        list(pool.map(work, PARTITIONS))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.random_faults", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("corpus", help="folder of a corpus: shards/ and vocabulary.tsv")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rig = ServedRig()
    if not rig.config.exists():
        sys.exit("no test cluster; start one with: python -m tests.cluster.rig start")
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        runs = run_all(rig, arguments.corpus, Path(folder), arguments.faults, arguments.seed)
    print(
        f"{sum(len(run.done) for run in runs)} faults in {len(runs)} runs: every curve is that of the undisturbed run"
    )


if __name__ == "__main__":
    main()
