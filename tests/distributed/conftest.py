"""The pool of processes, one process alone, and a tiny corpus of simulated cells that all of them
train on.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch.distributed as dist

from cellmill.cli import main
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.testing import add_numbers, write_shards
from tests.distributed.pool import Pool
from tests.models import split


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker of pytest runs the modules that use the pool, which it starts once, and one each
    other module.
    """
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    pooled = {item.path for item in ours if "pool" in getattr(item, "fixturenames", ())}
    for item in ours:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(
                pytest.mark.xdist_group("pool" if item.path in pooled else item.path.stem)
            )


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], Pool]]:
    """Pools by their number of processes, of which one is alive: two on a node, or eight as two
    nodes of four.

    They end with the module: the threads of idle groups poll, and took a quarter of two cores from
    the tests after it.
    """
    made: dict[int, Pool] = {}

    def pool_of(world: int) -> Pool:
        for other in made.keys() - {world}:
            made[other].close()
        return made.setdefault(world, Pool(world, local_world=4 if world == 8 else 2))

    yield pool_of
    for pool in made.values():
        pool.close()


@pytest.fixture(scope="module")
def pool(pools: Callable[[int], Pool]) -> Pool:
    """Four processes, as two nodes of two."""
    return pools(4)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process as a group of one: the reference of every layout. Ends with the module: others
    make their own.
    """
    os.environ |= {"LOCAL_WORLD_SIZE": "1"}
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with vocabulary.tsv and shards/manifest.json of 240 simulated cells.

    Most have an age, which follows from their type; all have a depth and fractions, and a fifth
    their type as label `few`. The folder `teacher` has vectors of most cells, for objective distill.
    """
    folder = tmp_path_factory.mktemp("corpus")
    assert (
        main(
            f"simulate --out {folder}/raw.h5ad --cells 240 --genes 120 --types 4 --batches 2 --seed 1".split()
        )
        == 0
    )
    cells = ad.read_h5ad(folder / "raw.h5ad")
    age = (
        30.0
        + 8 * cells.obs["cell_type"].cat.codes.to_numpy()
        + np.random.default_rng(0).normal(size=len(cells))
    )
    age[::10] = np.nan
    few = cells.obs["cell_type"].where(np.arange(len(cells)) % 5 == 0)
    cells.obs = cells.obs.assign(
        age=age, depth=np.asarray(cells.X.sum(1)).ravel(), one=1.0, few=few
    )
    cells.write_h5ad(folder / "raw.h5ad")
    add_numbers(folder / "raw.h5ad")
    write_shards(folder, "raw.h5ad")
    vectors = np.random.default_rng(1).normal(2, 3, (len(cells), 6))
    vectors[::7] = np.nan
    (folder / "big").mkdir()
    ad.AnnData(obs=cells.obs[[]], obsm={"X_emb": vectors}).write_h5ad(folder / "big" / "sim.h5ad")
    words = f"--manifest {folder}/shards/manifest.json --embeddings {folder}/big/sim.h5ad --out {folder}/teacher"
    assert main(["teach", *words.split()]) == 0
    return str(folder)


@pytest.fixture(scope="session")
def proteins(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same of 120 simulated proteins."""
    folder = tmp_path_factory.mktemp("proteins")
    assert main(f"simulate --out {folder}/raw.fasta --cells 120 --types 3 --seed 1".split()) == 0
    return str(write_shards(folder, "raw.fasta"))


@pytest.fixture(scope="session")
def vectors(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with vectors of two thirds of the corpus's genes."""
    genes = Vocabulary.read(Path(corpus) / "vocabulary.tsv").gene_ids
    path = tmp_path_factory.mktemp("vectors") / "vectors.npy"
    np.save(path, np.random.default_rng(0).normal(1, 3, (len(genes) * 2 // 3, 6)))
    path.with_suffix(".genes.txt").write_text(
        "".join(f"{gene}\n" for gene in genes[: len(genes) * 2 // 3])
    )
    return str(path)


def options(parallel: dict[str, Any] | None = None, **overrides: dict[str, Any]) -> dict[str, Any]:
    """Options of a small run; `parallel` and other sections override keys."""
    tree: dict[str, Any] = {
        "tokens": {"tokenizer": "continuous", "max_tokens": 64},
        "stream": {"lanes": 4, "block_cells": 8, "window_blocks": 4},
        "model": {"family": "encoder", "hidden": 32, "layers": 2, "heads": 4, "dropout": 0.1},
        "parallel": parallel or {},
        "train": {
            "steps": 6,
            "global_batch": 16,
            "token_budget": 4096,
            "lr": 1e-3,
            "warmup_steps": 2,
            "clip_norm": 0.5,
            "log_every_steps": 1,
            "val_every_steps": 100,
            "checkpoint_every_steps": 100,
        },
    }
    for section, values in overrides.items():
        tree[section] = tree.get(section, {}) | values
    return tree | split(tree["model"])
