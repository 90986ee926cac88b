"""CPU-seconds of jobs as ratios to a fixed numpy loop, against the budget in benchmarks/budget.toml
(`make bench`).

Jobs take turns, and each turn has the loop before and after the job, so that a machine or an hour
can be compared with another one. Loops are compiled before the first turn. Exits with a line for
each job whose median ratio is more than a quarter above its budget.

    python benchmarks/budget.py [--repeats 3] [--cells 4096]
"""

import argparse
import io
import shlex
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
import torch.distributed as dist
from loader import CONTINUOUS, RANK, own
from loader_corpus import GENES, Corpus, compile_loops, make_corpus
from origin import commit, machine
from prepare import Work, cellmill_stages, cpu_seconds
from raw_counts import write_raw
from regression import SHAPES, problem
from threadpoolctl import threadpool_limits
from train_step import packed_step

from cellmill.config.parts.families import ProfileConfig
from cellmill.config.parts.objectives import CellDecodingConfig
from cellmill.config.parts.tokens import ContinuousTokens
from cellmill.config.run import Embed
from cellmill.data.inputs.formats import open_dataset
from cellmill.data.rows import SparseCounts
from cellmill.data.stream.tokenizer import tokenize_to_batch
from cellmill.evaluate.classifiers.fitted import NearestCells, make_classifiers, precompute_folds
from cellmill.evaluate.features.components import COMPONENTS, project_on_fitted
from cellmill.evaluate.features.products import FeatureCache
from cellmill.evaluate.inference.embed import InferenceModel, embed_cells
from cellmill.evaluate.splits import split_by_class
from cellmill.models.batch import to_tensors
from cellmill.models.build import ModelSpec, build

BUDGET = Path(__file__).with_name("budget.toml")
MARGIN = 1.25
CELLS = 4096
TOKENS = ContinuousTokens(max_tokens=1024)
SPEC = ModelSpec(
    ProfileConfig(hidden=128, layers=1), CellDecodingConfig(view="drop_thin"), TOKENS, 757
)


def yardstick() -> None:
    rng = np.random.default_rng(0)
    values = rng.random(1 << 20)
    matrix = rng.random((400, 400))
    small = rng.random((8, 160))
    order = rng.permutation(len(values))
    for _ in range(3):
        np.log1p(values[order]).cumsum()
        values.argsort()
        matrix @ matrix
    for _ in range(6_000):
        np.exp(small - small.max(0)).sum(0)


def stream(corpus: Corpus, gives: str) -> Work:
    epochs = own(8, gives)(corpus, 64)
    return lambda: [sum(next(epochs)) for _ in range(8)]


def prepare(folder: Path, cells: int) -> Work:
    raw = folder / "raw.h5ad"
    write_raw(raw, cells, 1_000, 0, compressed=False)

    def work() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as out, redirect_stdout(io.StringIO()):
            for stage in cellmill_stages(raw, Path(out)).values():
                stage()

    return work


def embed(corpus: Corpus) -> Work:
    model = build(replace(SPEC, n_genes=GENES)).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.1)

    loaded = InferenceModel(model, corpus.vocabulary, TOKENS, {})

    def work() -> None:
        with open_dataset(corpus.cells) as reader:
            embed_cells(reader, loaded, Embed(token_budget=1 << 17))

    return work


def step(steps: int) -> Work:
    """Optimizer steps of 32 cells with the demo's model."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(150, 350, 32)
    genes = np.concatenate([rng.permutation(SPEC.n_genes)[:n] for n in lengths]).astype(np.int32)
    counts = rng.geometric(0.4, len(genes)).astype(np.uint16)
    cells = SparseCounts(np.append(0, lengths.cumsum()), genes, counts)
    batch = to_tensors(
        tokenize_to_batch(TOKENS.load()(TOKENS), cells, np.arange(32), with_counts=True)
    )
    work = packed_step(SPEC, torch.device("cpu"), "fp32")
    return lambda: [work(batch, number) for number in range(steps)]


def fits(problems: int) -> Work:
    """Fits and predictions of the evaluation's classifiers."""
    made = [problem(*shape, seed) for shape in SHAPES[:-1] for seed in range(problems)]
    return lambda: [
        own.fit(x, y).predict(new) for x, y, new in made for own in make_classifiers(5).values()
    ]


def folds(cells: int, genes: int = 3_000) -> Work:
    """What task `probe` does with all genes in 5 folds: products, regressions, components, kNN."""
    rng = np.random.default_rng(0)
    number = rng.integers(0, 8, cells)
    rates = np.exp(rng.normal(-2.5, 1, (8, genes)))
    profiles = sp.csr_matrix(np.log1p(rng.poisson(rates[number])).astype(np.float32))
    labels = number.astype(str)
    splits = [*split_by_class(labels, 5, 1, 0)]

    def work() -> None:
        shared = FeatureCache().share(profiles)
        precompute_folds(shared, labels, splits, {})
        for split in splits:
            project_on_fitted(shared.products(shared), split.fitted, COMPONENTS)
            nearest = NearestCells(15).fit(shared[split.fitted], labels[split.fitted])
            nearest.predict(shared[split.tested])

    return work


def of_loop(work: Work) -> float:
    before, own, after = map(cpu_seconds, (yardstick, work, yardstick))
    return 2 * own / (before + after)


def over_budget(medians: Mapping[str, float], budget: Mapping[str, float]) -> list[str]:
    return [
        f"{name}: {found:.2f} times the numpy loop, expected at most {MARGIN * budget[name]:.2f}, a quarter above "
        f"{BUDGET}; make it faster, or set the new ratio there"
        for name, found in medians.items()
        if found > MARGIN * budget[name]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="turns (default: %(default)s)")
    parser.add_argument(
        "--cells", type=int, default=CELLS, help="others are not compared (default: %(default)s)"
    )
    given = parser.parse_args()
    part = given.cells / CELLS
    budget = tomllib.loads(BUDGET.read_text())["ratios"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="cellmill-budget-") as name:
        folder = Path(name)
        corpus = make_corpus(Path(name), given.cells)
        compile_loops()
        jobs = {
            "stream of continuous tokens": stream(corpus, CONTINUOUS),
            "stream of rank tokens": stream(corpus, RANK),
            "preprocess, vocabulary, shard": prepare(folder, given.cells),
            "embed": embed(corpus),
            "steps of profile": step(max(3, int(100 * part))),
            "fits of the evaluation": fits(max(1, int(12 * part))),
            "folds of all genes": folds(max(300, int(2_600 * part))),
        }
        turns = [
            {job: of_loop(work) for job, work in jobs.items()} for _ in range(given.repeats + 1)
        ]
    # the first turn is not counted
    ratios = {job: [turn[job] for turn in turns[1:]] for job in jobs}
    medians = {job: statistics.median(found) for job, found in ratios.items()}
    print(
        f"{machine()}; commit {commit()}; `{shlex.join([Path(sys.executable).name, *sys.argv])}`\n"
    )
    print("| job | of the numpy loop | range | budget |\n|---|---:|---:|---:|")
    for job, found in ratios.items():
        print(
            f"| {job} | {medians[job]:.2f} | {min(found):.2f} to {max(found):.2f} | {budget[job]:.2f} |"
        )
    if given.cells == CELLS and (lines := over_budget(medians, budget)):
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with threadpool_limits(1):
        main()
