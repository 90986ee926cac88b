"""Cells of the data engine per CPU-second and second, warm and cold, beside other loaders over the
same cells.

Every loader is a process of its own; they take turns, an epoch each, so that a busy machine slows
all alike. CPU-seconds are of all threads; medians and ranges. A warm epoch follows two that are not
counted, and what the process prepares for the next epoch belongs to it. Compiled loops are waited
for before the first one, as in a training they are there after a few seconds. Before a cold epoch
the files are dropped from the page cache, and the loader is opened anew, which counts. "Genes and
counts" are unpacked, as all rows that cellmill's stream gives. Peers (`loader_peers.py`) are left
out where they cannot be imported.

With `--beside FOLDER` the stream of another checkout, which has a .venv of its own and makes its
own shards, takes its turns too:

    git worktree add ../before 1436b97a && make -C ../before install
    python benchmarks/loader.py --repeats 5 --beside ../before
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
from typing import Literal

import numpy as np
from loader_corpus import (
    BLOCK_CELLS,
    MAX_TOKENS,
    WINDOW_BLOCKS,
    Corpus,
    compile_loops,
    make_corpus,
)
from loader_floor import c_loop, c_tokens, packed_reads
from loader_peers import CONTINUOUS, PEERS, RANK, RAW, STORES, Epochs
from origin import commit, machine
from raw_counts import used

from cellmill.config.parts.tokens import Tokens
from cellmill.config.run import Stream as StreamOptions
from cellmill.data.packing.cells import CellKind
from cellmill.data.shards.manifest import Manifest
from cellmill.data.shards.reader import open_shards
from cellmill.data.stream.cell_stream import CellStream, SplitSource
from cellmill.data.stream.micro_batches import MicroBatchRule
from cellmill.data.stream.order import ONLY_RANK, DataRank, OrderOptions, OrderRule
from cellmill.data.stream.step_reader import StepGroup, StepReader

WORLD = 4  # ranks among which cells are counted
WHOLE = "continuous tokens, whole cells"
WHOLE_TOKENS = 4_096  # more than the longest cell
LANES = "8 lanes"
GENES_ORDER = "8 lanes, shard.order genes"
BESIDE = "beside"
Key = tuple[str, str, str]  # package, variant, what it gives


@dataclass
class Turns:
    """CPU-seconds and seconds per cell, of warm and cold epochs; the first warm one is not counted."""

    warm: list[tuple[float, float]] = field(default_factory=list)
    cold: list[tuple[float, float]] = field(default_factory=list)

    def rate(self, how: str, what: int = 0) -> float:
        """Cells per CPU-second (`what` 0) or second (1); NaN if none was measured."""
        spent = [turn[what] for turn in getattr(self, how)]
        return 1 / statistics.median(spent) if spent else float("nan")

    def ratio(self, other: "Turns", how: str) -> tuple[float, float, float]:
        """Ratio of rates to another loader's: of medians, and the range over turns."""
        pairs = list(zip(getattr(other, how), getattr(self, how)))
        ratios = [there[0] / here[0] for there, here in pairs] or [float("nan")]
        return self.rate(how) / other.rate(how), min(ratios), max(ratios)


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
        "--beside", type=Path, metavar="FOLDER", help="a checkout whose stream takes turns too"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="TEXT",
        default=[""],
        help="leave out loaders whose row has none of these texts",
    )
    parser.add_argument(
        "--serve",
        nargs=3,
        metavar=("PACKAGE", "VARIANT", "GIVES"),
        help="run epochs asked for on stdin",
    )
    arguments = parser.parse_args()
    if arguments.serve:
        compile_loops()
        serve(
            LOADERS[tuple(arguments.serve)],
            make_corpus(arguments.folder, arguments.cells),
            arguments.batch,
        )
        return
    print(
        f"{machine()}, load {os.getloadavg()[0]:.1f}; commit {commit()}; "
        f"`{shlex.join([Path(sys.executable).name, *sys.argv])}`\n"
    )
    with tempfile.TemporaryDirectory(prefix="cellmill-loader-") as temporary:
        folder = arguments.folder or Path(temporary)
        corpus = make_corpus(folder, arguments.cells)
        make_corpus(folder, arguments.cells, "genes")
        commands = {
            key: [sys.executable, __file__, "--serve", *key]
            for key in LOADERS
            if any(text in ", ".join(key) for text in arguments.only)
        }
        if arguments.beside:
            beside = commands_beside(arguments.beside.resolve())
            if not (folder / "beside").exists():  # one of them makes the shards
                first = [*next(iter(beside.values())), folder, arguments.cells, arguments.batch]
                subprocess.run(list(map(str, first)), stdin=subprocess.DEVNULL, check=True)
            commands |= beside
        turns = take_turns(commands, folder, arguments)
        print_table(turns)
        print_ratios(turns)
        print_bytes(folder, corpus)
        resume_s = statistics.median(
            first_batch_after_resume(corpus, arguments.batch) for _ in range(5)
        )
        lost, repeated = count_cells(corpus, arguments.batch)
    print(f"\nload at the end: {os.getloadavg()[0]:.1f}")
    print(f"first batch after resume: {resume_s:.3f} s")
    print(f"one epoch over {WORLD} ranks: {lost} cells lost, {repeated} repeated")


# serves a loader of another checkout: its own loader.py, which makes its own shards
SERVE_BESIDE = """
import sys
from pathlib import Path
checkout, gives, folder, cells, batch = sys.argv[1:]
sys.path.insert(0, checkout + "/benchmarks")
import loader
if gives.endswith("whole cells"):
    loader.MAX_TOKENS = {whole}
    gives = "continuous tokens"
folder = Path(folder) / "beside"
folder.mkdir(exist_ok=True)
loader.serve(
    loader.LOADERS["cellmill", "8 lanes", gives], loader.make_corpus(folder, int(cells)), int(batch)
)
"""


def commands_beside(checkout: Path) -> dict[Key, list[str]]:
    """Commands that serve the stream of another checkout."""
    python = str(checkout / ".venv" / "bin" / "python")
    code = SERVE_BESIDE.format(whole=WHOLE_TOKENS)
    return {
        (BESIDE, LANES, gives): [python, "-c", code, str(checkout), gives]
        for gives in (CONTINUOUS, WHOLE, RANK, RAW)
    }


def take_turns(
    commands: dict[Key, list[str]], folder: Path, arguments: argparse.Namespace
) -> dict[Key, Turns]:
    """Measure every loader that can be imported. One that fails is named on stderr and left out."""
    started = {}
    for key, command in commands.items():
        sizes = ["--folder", folder, "--cells", arguments.cells, "--batch", arguments.batch]
        given = sizes[1::2] if key[0] == BESIDE else sizes
        started[key] = subprocess.Popen(
            [*command, *map(str, given)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    serving = {}
    for key, process in started.items():
        if answer(process) is None:
            print(f"{' '.join(key)} is left out", file=sys.stderr)
        else:
            serving[key] = process
    turns = {key: Turns() for key in serving}
    for how in ("warm", "cold"):
        for turn in range(arguments.repeats + (how == "warm")):
            for key, process in list(serving.items()):
                if how == "cold" and "in memory" in key[1]:
                    continue
                if how == "cold":
                    drop_cache(folder)
                print(how, file=process.stdin, flush=True)
                spent = answer(process)
                if spent is not None and (turn or how == "cold"):
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
    """A line for each loader."""
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
                [
                    package if package in ("cellmill", BESIDE) else f"{package} {version(package)}",
                    variant,
                ],
            )
        )
    except PackageNotFoundError:
        return f"{package}, {variant}"


def print_ratios(turns: dict[Key, Turns]) -> None:
    """Ratios of cells per CPU-second, ours over another loader's that gives the same."""
    print("\n| cellmill | over | gives | warm (range) | cold (range) |\n|---|---|---|---:|---:|")
    for variant in (LANES, GENES_ORDER):
        for key, turn in turns.items():
            gives = key[2]
            ours = turns.get(("cellmill", variant, gives))
            if (
                ours is None
                or ours is turn
                or (variant != LANES and key[0] not in (BESIDE, "C loop"))
            ):
                continue
            cells = []
            for how in ("warm", "cold"):
                ratio, low, high = ours.ratio(turn, how)
                cells.append("" if np.isnan(ratio) else f"{ratio:.2f} ({low:.2f} to {high:.2f})")
            print(f"| {variant} | {named(*key[:2])} | {gives} | {' | '.join(cells)} |")


def print_bytes(folder: Path, corpus: Corpus) -> None:
    """Bytes per nonzero of each store of the cells, with obs, var and offsets."""
    n_nonzeros = sum(shard.nnz for shard in open_shards(Manifest.read(corpus.manifest), "train"))
    shards = [f"shards-{order}-{corpus.n_cells}/[!p]*" for order in ("rank", "genes")]
    stores = {
        "cellmill, shard.order rank": shards[0],
        "cellmill, shard.order genes": shards[1],
        "cellmill, preprocessed": corpus.cells.name,
        "cellmill beside, shards": f"beside/shards-{corpus.n_cells}/*",
        "cellmill beside, preprocessed": f"beside/cells-{corpus.n_cells}.h5ad",
        "plain .h5ad without filters": f"plain-{corpus.n_cells}.h5ad",
    } | STORES
    print("\n| store | bytes per nonzero |\n|---|---:|")
    for name, pattern in stores.items():
        n_bytes = sum(used(path) for path in folder.glob(pattern))
        if n_bytes:
            print(f"| {name} | {n_bytes / n_nonzeros:.2f} |")


def own_tokens(corpus: Corpus, options: StreamOptions, batch: int, gives: str) -> Epochs:
    max_tokens = WHOLE_TOKENS if gives == WHOLE else MAX_TOKENS
    stream = open_stream(corpus, options, batch, gives.split()[0], max_tokens=max_tokens)
    batches = iter(stream)
    try:
        while True:
            yield (
                sum(len(b.cell_ids) for b in next(batches)) for _ in range(stream.steps_per_epoch)
            )
    finally:
        stream.close()


def own_rows(corpus: Corpus, options: StreamOptions, batch: int) -> Epochs:
    manifest = Manifest.read(corpus.manifest)
    shards = open_shards(manifest, "train")
    sizes = tuple(shard.n_obs for shard in shards)
    rule = OrderRule(OrderOptions(options, batch, seed=0), sizes)
    rows = StepReader(shards, rule, ONLY_RANK, options.io_threads)
    batches = rows_of_steps(rows.read_steps(0, 0), shards[0].kind)
    try:
        while True:
            yield (len(next(batches)[0]) for _ in range(rule.steps_per_epoch))
    finally:
        rows.close()


def rows_of_steps(groups: Iterator[StepGroup], kind: CellKind) -> Iterator[tuple[np.ndarray, ...]]:
    """Cells of each step, where their genes start, and their genes and counts."""
    for steps in groups:
        starts, genes, counts = steps.local_cells.packed.unpack(kind)
        assert counts is not None
        for first, last in pairwise([0, *steps.cells_by_rank[:, 0].cumsum().tolist()]):
            own = slice(starts[first], starts[last])
            own_starts = starts[first : last + 1] - starts[first]
            yield steps.local_cells.ids[first:last], own_starts, genes[own], counts[own]


def open_stream(
    corpus: Corpus,
    options: StreamOptions,
    batch: int,
    tokenizer: str,
    rank: int = 0,
    world: int = 1,
    max_tokens: int = MAX_TOKENS,
) -> CellStream:
    tokens = Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": max_tokens})
    return CellStream(
        SplitSource(corpus.manifest, "train"),
        OrderOptions(options, batch, seed=0),
        tokens,
        MicroBatchRule(batch * max_tokens),
        data_rank=DataRank(rank, world),
        in_rank_order=False,  # as for family encoder
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
                seen += np.bincount(made.cell_ids, minlength=corpus.n_cells)
        stream.close()
    return int((seen == 0).sum()), int(np.maximum(seen - 1, 0).sum())


def own(
    lanes: int, gives: str, order: Literal["rank", "genes"] = "rank"
) -> Callable[[Corpus, int], Epochs]:
    """Our stream, or the rows under it; windows of the same number of cells whatever `lanes`."""
    sizes = {"lanes": lanes, "block_cells": BLOCK_CELLS, "window_blocks": WINDOW_BLOCKS // lanes}
    options = StreamOptions.model_validate(sizes)

    def make(corpus: Corpus, batch: int) -> Epochs:
        corpus = make_corpus(corpus.cells.parent, corpus.n_cells, order)
        if gives == RAW:
            return own_rows(corpus, options, batch)
        return own_tokens(corpus, options, batch, gives)

    return make


LOADERS: dict[Key, Callable[[Corpus, int], Epochs]] = (
    {("cellmill", LANES, gives): own(8, gives) for gives in (CONTINUOUS, WHOLE, RANK, RAW)}
    | {("cellmill", "1 lane", RANK): own(1, RANK)}
    | {
        ("cellmill", GENES_ORDER, gives): own(8, gives, "genes")
        for gives in (CONTINUOUS, WHOLE, RANK, RAW)
    }
    | {
        ("C loop", "of memcpy", RAW): c_loop,
        ("C loop", "of reads of packed bytes", RAW): packed_reads,
        ("C loop", "of tokens", CONTINUOUS): partial(c_tokens, gives=CONTINUOUS),
        ("C loop", "of tokens", RANK): partial(c_tokens, gives=RANK),
        **PEERS,
    }
)


if __name__ == "__main__":
    main()
