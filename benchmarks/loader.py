"""Cells of the data engine per CPU-second and second, warm and cold, beside other loaders over the
same cells.

Every loader is a process of its own; they take turns, an epoch each, so that a busy machine slows
all alike. CPU-seconds are of all threads; medians. A warm epoch follows one that is not counted,
and what the process prepares for the next epoch belongs to it. Before a cold epoch the files are
dropped from the page cache, and the loader is opened anew, which counts. Peers (`loader_peers.py`)
are left out where they cannot be imported.

    python benchmarks/loader.py --repeats 5
"""

import argparse
import gc
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
from loader_corpus import BLOCK_CELLS, MAX_TOKENS, WINDOW_BLOCKS, Corpus, make_corpus
from loader_floor import c_loop, c_tokens
from loader_peers import CONTINUOUS, PEERS, RANK, RAW, Epochs
from origin import commit, machine

from cellmill.config.parts.tokens import Tokens
from cellmill.config.run import Stream as StreamOptions
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.reader import open_shards
from cellmill.data.stream.cell_stream import CellStream
from cellmill.data.stream.order import EpochLayout
from cellmill.data.stream.prefetch import Prefetch, PrefetchedSteps

WORLD = 4  # ranks among which cells are counted
BINNED = "binned tokens"
Key = tuple[str, str, str]  # package, variant, what it gives


@dataclass
class Turns:
    """CPU-seconds and seconds per cell, of warm and cold epochs."""

    warm: list[tuple[float, float]] = field(default_factory=list)
    cold: list[tuple[float, float]] = field(default_factory=list)

    def rate(self, how: str, what: int = 0) -> float:
        """Cells per CPU-second (`what` 0) or second (1); NaN if none was measured."""
        spent = [turn[what] for turn in getattr(self, how)]
        return 1 / statistics.median(spent) if spent else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cells", type=int, default=32_768, help="(default: %(default)s)")
    parser.add_argument(
        "--batch", type=int, default=64, help="cells of a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="epochs of each, warm and cold (default: %(default)s)",
    )
    parser.add_argument(
        "--folder", type=Path, help="where data are made, and kept; default: a temporary folder"
    )
    parser.add_argument(
        "--serve",
        nargs=3,
        metavar=("PACKAGE", "VARIANT", "GIVES"),
        help="run epochs asked for on stdin",
    )
    arguments = parser.parse_args()
    if arguments.serve:
        serve(
            LOADERS[tuple(arguments.serve)],
            make_corpus(arguments.folder, arguments.cells),
            arguments.batch,
        )
        return
    print(
        f"{machine()}; commit {commit()}; `{shlex.join([Path(sys.executable).name, *sys.argv])}`\n"
    )
    with tempfile.TemporaryDirectory(prefix="cellmill-loader-") as temporary:
        folder = arguments.folder or Path(temporary)
        corpus = make_corpus(folder, arguments.cells)
        turns = take_turns(folder, arguments.cells, arguments.batch, arguments.repeats)
        print_table(turns)
        print_goals(turns)
        resume_s = statistics.median(
            first_batch_after_resume(corpus, arguments.batch) for _ in range(5)
        )
        lost, repeated = count_cells(corpus, arguments.batch)
    print(f"\nfirst batch after resume: {resume_s:.3f} s")
    print(f"one epoch over {WORLD} ranks: {lost} cells lost, {repeated} repeated")


def take_turns(folder: Path, cells: int, batch: int, repeats: int) -> dict[Key, Turns]:
    """Measure every loader that can be imported. One that fails is named on stderr and left out."""
    serving = {}
    for key in LOADERS:
        command = [
            sys.executable,
            __file__,
            "--serve",
            *key,
            "--folder",
            folder,
            "--cells",
            cells,
            "--batch",
            batch,
        ]
        process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if answer(process) is None:
            print(f"{' '.join(key)} is left out", file=sys.stderr)
        else:
            serving[key] = process
    turns = {key: Turns() for key in serving}
    for how in ("warm", "cold"):
        for _ in range(repeats):
            for key, process in list(serving.items()):
                if how == "cold" and "in memory" in key[1]:
                    continue
                if how == "cold":
                    drop_cache(folder)
                print(how, file=process.stdin, flush=True)
                spent = answer(process)
                if spent is not None:
                    getattr(turns[key], how).append(tuple(spent))
    for process in serving.values():
        process.communicate()
    return turns


def answer(process: subprocess.Popen[str]) -> list[float] | None:
    """The next line of numbers of a process; None if it ended."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.startswith("["):  # others are of a peer
            return list(json.loads(line))
    return None


def serve(make: Callable[[Corpus, int], Epochs], corpus: Corpus, batch: int) -> None:
    """Run an epoch for every line of stdin; print CPU-seconds and seconds per cell."""
    epochs: Epochs | None = make(corpus, batch)
    n_cells = sum(next(epochs))
    print(json.dumps([n_cells]), flush=True)
    ended = time.process_time()
    for line in sys.stdin:
        began = time.perf_counter()
        if line.strip() == "cold" or epochs is None:
            epochs = make(corpus, batch)
            ended = time.process_time()
        n_cells = sum(next(epochs))
        wall_s = time.perf_counter() - began
        cpu_s = time.process_time() - ended
        # nothing may hold pages when the cache is dropped for the next one
        if line.strip() == "cold":
            epochs.close()  # type: ignore[attr-defined]
            epochs = None
            gc.collect()
        ended = time.process_time() if epochs is None else ended + cpu_s
        print(json.dumps([cpu_s / n_cells, wall_s / n_cells]), flush=True)


def drop_cache(folder: Path) -> None:
    """Drop the files of `folder` from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def print_table(turns: dict[Key, Turns]) -> None:
    """A line for each loader; ratios are to the default tokenizer, 8 lanes."""
    print(
        "| loader | gives | warm, cells per CPU-second | cells/s | cold, cells per CPU-second | cells/s |"
    )
    print("|---|---|---:|---:|---:|---:|")
    for (package, variant, gives), turn in turns.items():
        rates = [turn.rate(how, what) for how in ("warm", "cold") for what in (0, 1)]
        numbers = " | ".join("" if np.isnan(rate) else f"{rate:,.0f}" for rate in rates)
        print(f"| {named(package, variant)} | {gives} | {numbers} |")


def named(package: str, variant: str) -> str:
    """Package with its version, and the variant."""
    try:
        return ", ".join(
            filter(
                None,
                [package if package == "cellmill" else f"{package} {version(package)}", variant],
            )
        )
    except PackageNotFoundError:
        return f"{package}, {variant}"


def print_goals(turns: dict[Key, Turns]) -> None:
    """Ratios of cells per CPU-second, ours over the other's, and the goal."""
    ours = ("cellmill", "8 lanes")
    one = ("cellmill", "1 lane")
    plain = ("annbatch", "plain rows")
    ranked = ("annbatch", "rank-ordered rows")
    scdl = ("bionemo-scdl", "")
    print("\n| 8 lanes against | gives | warm | cold | goal, warm |\n|---|---|---:|---:|---:|")
    for other, gives, goal in (
        (plain, CONTINUOUS, 2),
        *(
            (("annbatch", f"{rows}, our tokenizer"), CONTINUOUS, 1.4)
            for rows in ("plain rows", "rank-ordered rows")
        ),
        (plain, RANK, 10),
        (ranked, RANK, 2.5),
        (plain, RAW, 2.5),
        (scdl, CONTINUOUS, 1.5),
        (scdl, RAW, 1.5),
        *((one, gives, 0.85) for gives in (CONTINUOUS, RANK, BINNED, RAW)),
        (("C loop", "of memcpy"), RAW, 0.6),
        (("C loop", "of reads"), RAW, 1),
        *((("C loop", "of tokens"), gives, 1) for gives in (CONTINUOUS, RANK)),
    ):
        if (*other, gives) in turns:
            pair = turns[*ours, gives], turns[*other, gives]
            warm, cold = (
                f"{pair[0].rate(how) / pair[1].rate(how):.2f}" for how in ("warm", "cold")
            )
            print(f"| {named(*other)} | {gives} | {warm} | {cold} | {goal} |")


def own_tokens(corpus: Corpus, options: StreamOptions, batch: int, tokenizer: str) -> Epochs:
    stream = open_stream(corpus, options, batch, tokenizer)
    batches = iter(stream)
    try:
        while True:
            yield (sum(len(b.cells) for b in next(batches)) for _ in range(stream.steps_per_epoch))
    finally:
        stream.close()


def own_rows(corpus: Corpus, options: StreamOptions, batch: int) -> Epochs:
    manifest = Manifest.read(corpus.manifest)
    shards = open_shards(manifest, "train")
    sizes = tuple(shard.n_obs for shard in shards)
    layout = EpochLayout(sizes, options, batch, seed=0, shuffle=True)
    rows = Prefetch(shards, layout, 0, 1, options.io_threads)
    batches = rows_of_steps(rows.steps(0, 0))
    try:
        while True:
            yield (len(next(batches)[0]) for _ in range(layout.steps_per_epoch))
    finally:
        rows.close()


def rows_of_steps(prefetched: Iterator[PrefetchedSteps]) -> Iterator[tuple[np.ndarray, ...]]:
    """Cells of each step, where their genes start, and their genes and counts."""
    for steps in prefetched:
        for first, last in pairwise([0, *steps.n_cells[:, 0].cumsum().tolist()]):
            part = steps.taken.slice(first, last)
            assert part.counts is not None
            yield part.cells, part.starts - part.starts[0], part.genes, part.counts


def open_stream(
    corpus: Corpus,
    options: StreamOptions,
    batch: int,
    tokenizer: str,
    rank: int = 0,
    world: int = 1,
) -> CellStream:
    tokens = Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": MAX_TOKENS})
    sizes = {"global_batch": batch, "token_budget": batch * MAX_TOKENS}
    return CellStream(
        corpus.manifest, "train", tokens, options, **sizes, rank=rank, world=world, seed=0
    )


def first_batch_after_resume(corpus: Corpus, batch: int) -> float:
    """Seconds from opening the manifest to the first batch, in the middle of an epoch."""
    options = StreamOptions(lanes=8, block_cells=BLOCK_CELLS, window_blocks=WINDOW_BLOCKS // 8)
    stream = open_stream(corpus, options, batch, "rank")
    state = stream.state_dict() | {"epoch": 3, "step": stream.steps_per_epoch // 2}
    stream.close()
    start = time.perf_counter()
    stream = open_stream(corpus, options, batch, "rank")
    stream.load_state_dict(state)
    next(iter(stream))
    seconds = time.perf_counter() - start
    stream.close()
    return seconds


def count_cells(corpus: Corpus, batch: int) -> tuple[int, int]:
    """Cells that no rank saw in an epoch, and times that one was seen again."""
    seen = np.zeros(corpus.n_cells, np.int64)
    for rank in range(WORLD):
        options = StreamOptions(lanes=8, block_cells=BLOCK_CELLS, window_blocks=WINDOW_BLOCKS // 8)
        stream = open_stream(corpus, options, batch, "rank", rank, WORLD)
        for step in islice(stream, stream.steps_per_epoch):
            for made in step:
                seen += np.bincount(made.cells, minlength=corpus.n_cells)
        stream.close()
    return int((seen == 0).sum()), int(np.maximum(seen - 1, 0).sum())


def own(lanes: int, gives: str) -> Callable[[Corpus, int], Epochs]:
    """Our stream, or the rows under it; windows of the same number of cells whatever `lanes`."""
    sizes = {"lanes": lanes, "block_cells": BLOCK_CELLS, "window_blocks": WINDOW_BLOCKS // lanes}
    options = StreamOptions.model_validate(sizes)
    if gives == RAW:
        return lambda corpus, batch: own_rows(corpus, options, batch)
    return lambda corpus, batch: own_tokens(corpus, options, batch, gives.split()[0])


LOADERS: dict[Key, Callable[[Corpus, int], Epochs]] = {
    ("cellmill", f"{lanes} lane{'s' * (lanes > 1)}", gives): own(lanes, gives)
    for lanes in (8, 1)
    for gives in (CONTINUOUS, RANK, BINNED, RAW)
} | {
    ("C loop", "of memcpy", RAW): c_loop,
    ("C loop", "of reads", RAW): partial(c_tokens, gives=RAW),
    ("C loop", "of tokens", CONTINUOUS): partial(c_tokens, gives=CONTINUOUS),
    ("C loop", "of tokens", RANK): partial(c_tokens, gives=RANK),
    **PEERS,
}


if __name__ == "__main__":
    main()
