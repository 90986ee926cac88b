"""Libraries of nearest neighbours, and the atlas that cellmill makes.

    OMP_NUM_THREADS=1 python benchmarks/atlas.py libraries --cells 200000    # usearch, hnswlib and faiss
    OMP_NUM_THREADS=1 python benchmarks/atlas.py atlas --cells 1000000       # the atlas itself

Vectors have 128 numbers, and clusters as embeddings have: cell types on a tree, donors that shift them, and noise of
falling variance. Recall is that of the 15 nearest among 2,000 new cells. Seconds are of the CPU, with one thread.
"""

import argparse
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
from origin import commit, machine

from cellmill.config.run import Atlas, Map
from cellmill.evaluate.atlas.build import EmbeddedCells, make_atlas, write_atlas
from cellmill.evaluate.atlas.mapping import map_vectors
from cellmill.evaluate.atlas.search import Points
from cellmill.evaluate.atlas.store import CellAtlas
from cellmill.evaluate.seen.seen_cells import Seen

WIDTH = 128
QUERIES = 2000
K = 15
TYPES = 300
DONORS = 40
BLOCK = 100_000


def draw_cells(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors `(n, WIDTH)` float32, types and donors."""
    tree = np.random.default_rng(1)
    spectrum = 1 / np.sqrt(np.arange(1, WIDTH + 1))
    centers = np.zeros((TYPES, WIDTH))
    for branches, scale in ((8, 3.0), (50, 2.0), (TYPES, 1.2)):
        nodes = tree.normal(size=(branches, WIDTH)) * spectrum * scale
        centers += nodes[tree.integers(0, branches, TYPES)]
    loadings = tree.normal(size=(TYPES, 12, WIDTH)) * spectrum * 0.35
    shifts = tree.normal(size=(DONORS, WIDTH)) * spectrum * 0.3
    sizes = tree.pareto(1.2, TYPES) + 0.05
    draw = np.random.default_rng(seed)
    types = draw.choice(TYPES, n, p=sizes / sizes.sum())
    donors = draw.integers(0, DONORS, n)
    vectors = np.empty((n, WIDTH), np.float32)
    for first in range(0, n, BLOCK):
        part = slice(first, first + BLOCK)
        kind = types[part]
        block = centers[kind] + shifts[donors[part]]
        block += draw.normal(size=block.shape) * spectrum * 0.3
        weights = draw.normal(size=(len(kind), 12))
        for number in np.unique(kind):
            of_type = kind == number
            block[of_type] += weights[of_type] @ loadings[number]
        vectors[part] = block
    return vectors, types, donors


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def recall(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.mean([len({*a} & {*b}) / K for a, b in zip(found, expected)]))


Search = Callable[[int], np.ndarray]
Made = tuple[str, float, Search]


def with_usearch(vectors: np.ndarray, queries: np.ndarray, path: str) -> Iterator[Made]:
    index_of = import_module("usearch.index").Index
    for dtype in ("f16", "i8"):
        index = index_of(ndim=WIDTH, metric="l2sq", dtype=dtype, connectivity=16, expansion_add=64)
        started = cpu_s()
        index.add(np.arange(len(vectors)), vectors, threads=1)
        build = cpu_s() - started
        index.save(path)

        def search(width: int, index: object = index) -> np.ndarray:
            index.expansion_search = width  # type: ignore[attr-defined]
            return np.array(index.search(queries, K, threads=1).keys)  # type: ignore[attr-defined]

        yield f"usearch, {dtype}", build, search


def with_hnswlib(vectors: np.ndarray, queries: np.ndarray, path: str) -> Iterator[Made]:
    index = import_module("hnswlib").Index(space="l2", dim=WIDTH)
    index.init_index(max_elements=len(vectors), ef_construction=64, M=16, random_seed=0)
    started = cpu_s()
    index.add_items(vectors, num_threads=1)
    build = cpu_s() - started
    index.save_index(path)

    def search(width: int) -> np.ndarray:
        index.set_ef(width)
        return np.asarray(index.knn_query(queries, K, num_threads=1)[0])

    yield "hnswlib, f32", build, search


def with_faiss(vectors: np.ndarray, queries: np.ndarray, path: str) -> Iterator[Made]:
    faiss = import_module("faiss")
    faiss.omp_set_num_threads(1)
    for name in ("fp16", "8bit"):
        kind = getattr(faiss.ScalarQuantizer, f"QT_{name}")
        index = faiss.IndexHNSWSQ(WIDTH, kind, 16)
        index.hnsw.efConstruction = 64
        started = cpu_s()
        index.train(vectors[:BLOCK])
        index.add(vectors)
        build = cpu_s() - started
        faiss.write_index(index, path)

        def search(width: int, index: object = index) -> np.ndarray:
            index.hnsw.efSearch = width  # type: ignore[attr-defined]
            return np.asarray(index.search(queries, K)[1])  # type: ignore[attr-defined]

        yield f"faiss, {name}", build, search


LIBRARIES = {"usearch": with_usearch, "hnswlib": with_hnswlib, "faiss": with_faiss}


def compare_libraries(n: int, names: list[str]) -> None:
    vectors, _, _ = draw_cells(n)
    queries, _, _ = draw_cells(QUERIES, seed=2)
    expected, _ = Points(vectors).nearest_exact(queries, K)
    print("| library | build CPU-s | MB | searched | recall@15 | cells per CPU-s |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/index"
            for title, build, search in LIBRARIES[name](vectors, queries, path):
                for width in (32, 64, 128):
                    started = cpu_s()
                    found = search(width)
                    rate = QUERIES / (cpu_s() - started)
                    size = os.path.getsize(path) / 1e6
                    found_frac = recall(found, expected)
                    print(
                        f"| {title} | {build:.0f} | {size:.0f} | {width} | {found_frac:.3f} | {rate:,.0f} |",
                        flush=True,
                    )


def measure_atlas(n: int) -> None:
    vectors, types, donors = draw_cells(n)
    labels = np.array([f"type {number}" for number in range(TYPES)], object)[types]
    names = np.array([f"donor {number}" for number in range(DONORS)], object)[donors]
    cells = EmbeddedCells("drawn", "type", vectors, np.arange(n), labels, names)
    queries, query_types, _ = draw_cells(20_000, seed=2)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        started = cpu_s()
        made = make_atlas([cells], "d", Atlas.model_validate({}))
        write_atlas(folder, made)
        build = cpu_s() - started
        size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        started = cpu_s()
        atlas = CellAtlas.read(folder, "d", WIDTH)
        reading = cpu_s() - started
        scaled = queries / np.float32(made.record.scale)
        started = cpu_s()
        found, _ = atlas.points.nearest(scaled, K)
        search = len(queries) / (cpu_s() - started)
        started = cpu_s()
        mapped = map_vectors(atlas, queries, Seen(None, ""), Map.model_validate({}))
        rate = len(queries) / (cpu_s() - started)
        expected, _ = atlas.points.nearest_exact(scaled[:QUERIES], K)
        refused = float(mapped.obs["cellmill_refused"].mean())
        right = np.asarray(mapped.obs["cellmill_label"].astype(object)) == labels_of(query_types)
        print(
            f"| {n:,} | {build:.0f} | {size:.0f} | {reading:.1f} | {recall(found[:QUERIES], expected):.4f} | "
            f"{search:,.0f} | {rate:,.0f} | {refused:.3f} | {right.mean():.3f} |",
            flush=True,
        )


def labels_of(types: np.ndarray) -> np.ndarray:
    return np.array([f"type {number}" for number in types], object)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["libraries", "atlas"])
    parser.add_argument("--cells", type=int, nargs="+", default=[200_000])
    parser.add_argument("--library", nargs="+", choices=[*LIBRARIES], default=[*LIBRARIES])
    given = parser.parse_args()
    print(f"{machine()}, load {os.getloadavg()[0]:.1f}, commit {commit()}\n")
    if given.what == "atlas":
        print(
            "| cells | build CPU-s | MB | read CPU-s | recall@15 | neighbours, cells per CPU-s | "
            "map, cells per CPU-s | refused | right |"
        )
        print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for n in given.cells:
        if given.what == "libraries":
            compare_libraries(n, given.library)
        else:
            measure_atlas(n)


if __name__ == "__main__":
    main()
