"""Cells per CPU-second of embedding preprocessed cells, beside its forward passes alone.

Simulated cells are embedded by an untrained `profile`, on one thread. The forward passes are those
of the same batches, kept as tensors; the two take turns. The difference is reading, ranking,
tokenizing and cutting into batches.

    python benchmarks/embed.py --cells 50000
"""

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from origin import commit, machine
from raw_counts import GENES, write_raw

from cellmill.config.options import PreprocessOptions, VocabularyOptions
from cellmill.config.run import Embed
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.formats import open_counts
from cellmill.evaluate.inference.embed import InferenceModel, embed_cells
from cellmill.models.build import build
from cellmill.models.export import initial_tensors, spec_of
from cellmill.stages import data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cells", type=int, default=50_000, help="(default: %(default)s)")
    parser.add_argument(
        "--detected", type=int, default=200, help="genes of a cell, about (default: %(default)s)"
    )
    parser.add_argument(
        "--hidden", type=int, default=64, help="width of the model (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="turns of each (default: %(default)s)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="cellmill-embed-") as name:
        cells, vocabulary = prepare(Path(name), arguments.cells, arguments.detected)
        tools = embedding(cells, vocabulary, arguments.hidden)
        turns = [[cpu_seconds(work) for work in tools.values()] for _ in range(arguments.repeats)]
    print(f"{machine()}; commit {commit()}; `{shlex.join([Path(sys.executable).name, *sys.argv])}`")
    print(f"\n{arguments.cells:,} cells x {GENES:,} genes, width {arguments.hidden}\n")
    print("| | CPU-seconds (range) | cells per CPU-second |\n|---|---:|---:|")
    for name, spent in zip(tools, zip(*turns)):
        cpu_s = statistics.median(spent)
        print(
            f"| {name} | {cpu_s:.2f} ({min(spent):.2f} to {max(spent):.2f}) | {arguments.cells / cpu_s:,.0f} |"
        )


def prepare(folder: Path, cells: int, detected: int) -> tuple[Path, Vocabulary]:
    """Preprocessed cells, all that were simulated, and their vocabulary."""
    raw = folder / "raw.h5ad"
    out = folder / "cells.h5ad"
    words = folder / "vocabulary.tsv"
    write_raw(raw, cells, detected, 0)
    keep_all = PreprocessOptions.model_validate(
        {"preprocess": {"min_genes": 1, "max_mito_frac": 1}}
    )
    data.preprocess(
        options=keep_all, input=raw, counts="X", dataset="raw", out=out, report=folder / "qc.json"
    )
    data.vocabulary(
        options=VocabularyOptions.model_validate({"vocabulary": {}}), cells=[out], out=words
    )
    return out, Vocabulary.read(words)


def embedding(cells: Path, vocabulary: Vocabulary, hidden: int) -> dict[str, Callable[[], None]]:
    """Embedding a file, and the forward passes of it, by name; both have run once."""
    sections = {
        "model": {"family": "profile", "hidden": hidden},
        "objective": {"name": "cell_decoding"},
        "tokens": {},
    }
    spec = spec_of(sections, vocabulary.n_genes)
    network: Any = build(spec).to_empty(device="cpu")
    network.load_state_dict(dict(initial_tensors(network, 0, None, vocabulary)), strict=False)
    forward = network.embed
    batches = list[Any]()

    def embed() -> None:
        with open_counts(cells) as reader:
            embed_cells(reader, InferenceModel(network, vocabulary, spec.tokens, {}), Embed())

    def passes() -> None:
        with torch.inference_mode():
            for batch in batches:
                forward(batch)

    def kept(batch: Any) -> torch.Tensor:
        batches.append(batch)
        return forward(batch)

    network.embed = kept
    embed()
    network.embed = forward
    passes()
    return {"embed": embed, "its forward passes alone": passes}


def cpu_seconds(work: Callable[[], None]) -> float:
    """CPU time of all threads."""
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    main()
