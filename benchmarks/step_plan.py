"""What a rank computes before each step for all ranks: lengths of their cells, and how many
micro-batches they cut.

No cell is read: shards have row lengths alone. The figures are of `--steps` steps of one rank of
many, after a warm-up. Small steps are computed some at a time, and the longest time is of all of
these; the mean, of a step, counts the windows of lanes that are looked up meanwhile. CPU time of
the thread that runs beside training.

    python benchmarks/step_plan.py [--worlds 8 128 1024] [--cells 8] [--steps 300]
"""

import argparse
import os
import time

import numpy as np
import torch
from train_step import commit, machine

from cellmill.config.run import Stream
from cellmill.data.stream.micro_batches import count_greedy_batches
from cellmill.data.stream.order import DataRank, OrderOptions, OrderRule
from cellmill.data.stream.step_reader import StepReader

BLOCK_CELLS = 64
WINDOW_BLOCKS = 128
MAX_TOKENS = 2_048
MEAN_GENES = 2_000
LANES_PER_RANK = 1
MICRO_BATCHES = 4  # of a rank's cells, about


class Lengths:
    """A shard without cells: their numbers of genes alone."""

    def __init__(self, n_obs: int) -> None:
        lengths = np.random.default_rng(0).gamma(4.0, MEAN_GENES / 4, n_obs).astype(np.int64) + 1
        self.indptr = np.concatenate([[0], np.cumsum(lengths)])
        self.part_offsets = np.zeros(2 * n_obs + 1, np.uint32)

    def read_bytes(self, *_: np.ndarray) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 128, 1024])
    parser.add_argument("--cells", type=int, default=8, help="cells of a step and rank")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    print(
        f"machine: {machine(torch.device('cpu'))}, load {os.getloadavg()[0]:.1f}; commit {commit()}\n"
    )
    print(
        "| ranks | lengths, mean ms | cuts, mean ms | steps at a time | both, longest ms | start, s |"
    )
    print("|---:|---:|---:|---:|---:|---:|")
    for world in arguments.worlds:
        start, lengths, cuts, steps = measured(world, arguments.cells, arguments.steps)
        total = 1e3 / steps.sum()
        longest = 1e3 * (lengths + cuts).max()
        print(
            f"| {world:,} | {total * lengths.sum():.2f} | {total * cuts.sum():.2f} | {np.median(steps):.0f} "
            f"| {longest:.2f} | {start:.2f} |",
            flush=True,
        )


def measured(
    world: int, cells: int, steps: int
) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """Seconds until the first step, and of each time: lengths of all ranks' cells, their cuts, and
    number of steps.
    """
    lanes = world * LANES_PER_RANK
    window = BLOCK_CELLS * WINDOW_BLOCKS
    shard = Lengths(2 * lanes * window)
    order = Stream(lanes=lanes, block_cells=BLOCK_CELLS, window_blocks=WINDOW_BLOCKS)
    rule = OrderRule(OrderOptions(order, world * cells, seed=0), (2 * lanes * window,))
    rows = StepReader([shard], rule, DataRank(0, world), io_threads=1)  # type: ignore[list-item]
    began = time.thread_time()
    taken = rows.read_steps(0, 0)
    next(taken)
    start = time.thread_time() - began
    budget = cells * MAX_TOKENS // MICRO_BATCHES
    each: list[tuple[float, float, int]] = []
    while sum(n for _, _, n in each) < steps:
        began = time.thread_time()
        together = next(taken)
        known = time.thread_time()
        count_greedy_batches(
            np.minimum(together.genes_per_cell, MAX_TOKENS), together.cells_by_rank.ravel(), budget
        )
        each.append((known - began, time.thread_time() - known, len(together.cells_by_rank)))
    rows.close()
    return start, *(np.array(column) for column in zip(*each))


if __name__ == "__main__":
    main()
