"""What a rank computes before each step for all ranks: lengths of their cells, and how many micro-batches they cut.

No cell is read: shards have row lengths alone. Each figure is of `--steps` steps of one rank of many, after a warm-up;
the mean counts the windows of lanes that are looked up meanwhile. CPU time of the thread that runs beside training.

    python benchmarks/step_plan.py [--worlds 8 128 1024] [--cells 8] [--steps 300]
"""

import argparse
import os
import time

import numpy as np
import torch
from train_step import commit, machine

from cellmill.data.stream.batch import most_micro_batches
from cellmill.data.stream.order import EpochLayout
from cellmill.data.stream.prefetch import Prefetch

BLOCK_CELLS, WINDOW_BLOCKS = 64, 128
MAX_TOKENS, MEAN_GENES = 2_048, 2_000
LANES_PER_RANK = 1
MICRO_BATCHES = 4  # of a rank's cells, about


class Lengths:
    """A shard without cells: their numbers of genes alone."""

    def __init__(self, n_obs: int) -> None:
        lengths = np.random.default_rng(0).gamma(4.0, MEAN_GENES / 4, n_obs).astype(np.int64) + 1
        self.indptr, self.dtype = np.concatenate([[0], np.cumsum(lengths)]), np.dtype(np.uint16)

    def scatter_genes(self, start: int, table: np.ndarray) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 128, 1024])
    parser.add_argument("--cells", type=int, default=8, help="cells of a step and rank")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    print(f"machine: {machine(torch.device('cpu'))}, load {os.getloadavg()[0]:.1f}; commit {commit()}\n")
    print("| ranks | lengths, mean ms | cuts, mean ms | both, median ms | both, longest ms | start, s |")
    print("|---:|---:|---:|---:|---:|---:|")
    for world in arguments.worlds:
        start, lengths, cuts = measured(world, arguments.cells, arguments.steps)
        both = 1e3 * (lengths + cuts)
        print(
            f"| {world:,} | {1e3 * lengths.mean():.2f} | {1e3 * cuts.mean():.2f} | {np.median(both):.2f} "
            f"| {both.max():.2f} | {start:.2f} |",
            flush=True,
        )


def measured(world: int, cells: int, steps: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Seconds until the first step, and of each step: the lengths of all ranks' cells, and the most micro-batches."""
    lanes, window = world * LANES_PER_RANK, BLOCK_CELLS * WINDOW_BLOCKS
    shard = Lengths(2 * lanes * window)
    layout = EpochLayout((2 * lanes * window,), lanes, BLOCK_CELLS, WINDOW_BLOCKS, world * cells, seed=0, shuffle=True)
    rows = Prefetch([shard], layout, 0, world, max_genes=1, io_threads=1)  # type: ignore[list-item]
    began = time.thread_time()
    taken = rows.steps(0, 0)
    next(taken)
    start, budget = time.thread_time() - began, cells * MAX_TOKENS // MICRO_BATCHES
    lengths, cuts = np.empty(steps), np.empty(steps)
    for at in range(steps):
        began = time.thread_time()
        step = next(taken)
        known = time.thread_time()
        most_micro_batches(np.minimum(step.lengths, MAX_TOKENS), step.n_cells, budget)
        lengths[at], cuts[at] = known - began, time.thread_time() - known
    rows.close()
    return start, lengths, cuts


if __name__ == "__main__":
    main()
