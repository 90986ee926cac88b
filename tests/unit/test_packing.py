"""Packed parts: by loops, by numpy and by the slow, obvious way; damage is refused, never read."""

import errno
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
from small_corpus import random_counts, stream_of, write_corpus

from cellmill.config.parts.tokens import Tokens
from cellmill.data import compiled_loops
from cellmill.data.compiled_loops import CompiledLoops, load_loops
from cellmill.data.genes.build import Medians
from cellmill.data.packing import codec
from cellmill.data.packing.cells import CellKind, GeneOrder, PackedCells, pack_cells
from cellmill.data.packing.codec import DamagedPart, Parts, ValueCoding
from cellmill.data.packing.layout import COLUMNS, GROUP, align_up
from cellmill.data.rank_order import RankOrder, rank_order_rows
from cellmill.data.rows import SparseCounts
from cellmill.data.shards.manifest import Manifest
from cellmill.data.split import hash_cells, hash_genes
from cellmill.data.stream.batch import Batch

ANY = 2**40
KINDS = ("numpy", "loops")


class Loops(CompiledLoops):
    """Loops that are always used, or never."""

    def __init__(self, loops: object) -> None:
        super().__init__()
        self._loops = loops

    def loops_for(self, n_values: int) -> object:
        return self._loops


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use(monkeypatch, request.param)
    return str(request.param)


def use(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    loops = Loops(load_loops() if kind == "loops" else None)
    monkeypatch.setattr(compiled_loops, "COMPILED", loops)


def test_the_main_thread_loads_loops_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> threading.Thread:
        return threading.current_thread()

    monkeypatch.setattr(compiled_loops, "load_loops", load)
    assert CompiledLoops(2).loops_for(1) is None
    assert CompiledLoops(2).loops_for(2) is threading.main_thread()
    loops = CompiledLoops(1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loops.expect, 1).result()
        reader = pool.submit(threading.current_thread).result()
    loaded_by = loops.loops_for(0)
    assert loaded_by not in (threading.main_thread(), reader)


def make_parts(seed: int, n_parts: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """Values and borders of parts of many widths: small values with a few large ones."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 1, 15, 16, 17, 255, 256, 257, 1000], n_parts)
    borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    n = int(borders[-1])
    small = rng.integers(0, rng.choice([1, 2, 9, 300]), n)
    large = rng.integers(0, 2 ** int(rng.choice([1, 8, 15, 17, 32])), n)
    return np.where(rng.random(n) < 0.05, large, small).astype(np.uint32), borders


def unpack_slowly(part: bytes, n_values: int) -> list[int]:
    """The values of a part, bit by bit, as the layout says."""
    sizes = [min(GROUP, n_values - first) for first in range(0, n_values, GROUP)]
    n_groups = len(sizes)
    widths = part[len(part) - n_groups :]
    n_patches = part[len(part) - 2 * n_groups : len(part) - n_groups]
    values: list[int] = []
    at = 0
    for size, width in zip(sizes, widths):
        n_rows = -(-size // COLUMNS)
        group = [0] * size
        for low in range(0, width, 16):
            bits = min(16, width - low)
            n_words = -(-n_rows * bits // 16)
            for i in range(size):
                row, column = divmod(i, COLUMNS)
                for bit in range(bits):
                    word, shift = divmod(row * bits + bit, 16)
                    place = at + 2 * (word * COLUMNS + column)
                    word_of_lane = int.from_bytes(part[place : place + 2], "little")
                    group[i] |= (word_of_lane >> shift & 1) << (low + bit)
            at += 2 * COLUMNS * n_words
        values += group
    total = sum(n_patches)
    highs = part[at : at + 2 * total]
    positions = part[at + 2 * total : at + 3 * total]
    patch = 0
    for number, n in enumerate(n_patches):
        for _ in range(n):
            high = int.from_bytes(highs[2 * patch : 2 * patch + 2], "little")
            values[GROUP * number + positions[patch]] |= high << widths[number]
            patch += 1
    assert len(part) == align_up(at + 3 * total + 2 * n_groups)
    return values


def all_of(memory: np.ndarray, sizes: np.ndarray, borders: np.ndarray) -> Parts:
    lengths = np.diff(borders)
    begins = np.cumsum(sizes) - sizes
    return Parts(np.array(memory), begins, sizes, lengths, lengths.copy(), borders[:-1].copy())


@pytest.mark.parametrize("seed", range(12))
def test_parts_are_those_of_the_layout(kind: str, seed: int) -> None:
    values, borders = make_parts(seed, 8)
    memory, sizes = codec.pack_parts(values, borders)
    ends = np.cumsum(sizes).tolist()
    unpacked = []
    for begin, end, n in zip([0, *ends], ends, np.diff(borders).tolist()):
        unpacked += unpack_slowly(memory[begin:end].tobytes(), n)
    assert unpacked == values.tolist()


@pytest.mark.parametrize("order", ["genes", "rank"])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_cells_are_their_parts_in_turn(kind: str, order: GeneOrder, dtype: type) -> None:
    rng = np.random.default_rng(3)
    lengths = rng.choice([0, 1, 17, 256, 700], 40)
    cells = [np.sort(rng.choice(5000, n, replace=False)) for n in lengths.tolist()]
    if order == "rank":
        cells = [rng.permutation(genes) for genes in cells]
    genes = np.concatenate(cells).astype(np.int32)
    counts = rng.integers(1, np.iinfo(dtype).max, len(genes), dtype, endpoint=True)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    memory, sizes = pack_cells(SparseCounts(starts, genes, counts), order)
    gene_bytes, count_bytes = np.ascontiguousarray(sizes.reshape(-1, 2).T)
    ends = np.cumsum(gene_bytes + count_bytes)
    count_starts = ends - count_bytes
    packed = PackedCells(memory, count_starts - gene_bytes, count_starts, ends, np.diff(starts))
    unpacked = packed.unpack(CellKind(order, 5000, np.dtype(dtype)))
    np.testing.assert_array_equal(unpacked.genes, genes)
    np.testing.assert_array_equal(unpacked.counts, counts)
    for number in range(len(lengths)):
        of_cell = slice(starts[number], starts[number + 1])
        expected = counts[of_cell].astype(np.int64) - 1
        part = memory[packed.count_starts[number] : packed.stops[number]].tobytes()
        assert unpack_slowly(part, int(lengths[number])) == expected.tolist()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_cells_have_the_same_hash_by_loops_and_numpy(
    dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    starts = np.cumsum([0, 0, 3, 700, 0, 41])
    genes = rng.integers(0, 900, starts[-1]).astype(np.int32)
    counts = rng.integers(1, np.iinfo(dtype).max, starts[-1], dtype, endpoint=True)
    gene_hashes = hash_genes(f"ENSG{number:011d}" for number in range(900))
    hashes = []
    for kind in KINDS:
        use(monkeypatch, kind)
        hashes.append(hash_cells(starts, genes, counts, gene_hashes).tolist())
    assert hashes[0] == hashes[1]
    assert len({*map(tuple, hashes[0])}) == 4  # the two empty cells are equal


def test_medians_are_the_same_by_loops_and_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    genes = rng.integers(0, 30, 5000).astype(np.int32)
    values = rng.lognormal(0, 3, 5000)
    medians = []
    for kind in KINDS:
        use(monkeypatch, kind)
        sketch = Medians(30)
        sketch.add(genes, values)
        medians.append(sketch.medians(np.arange(30)).tolist())
        assert sketch.counts().tolist() == np.bincount(genes).tolist()
    assert medians[0] == medians[1]


def test_genes_that_do_not_ascend_are_refused(kind: str) -> None:
    ones = np.ones(3, np.uint16)
    starts = np.array([0, 1, 3])
    pack_cells(SparseCounts(starts, np.array([5, 2, 4], np.int32), ones), "genes")
    for genes in ([5, 4, 4], [5, 4, 2], [-1, 2, 4]):
        with pytest.raises(ValueError, match="do not ascend"):
            pack_cells(SparseCounts(starts, np.array(genes, np.int32), ones), "genes")


@pytest.mark.parametrize("seed", range(12))
def test_loops_and_numpy_write_the_same_bytes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values, borders = make_parts(seed)
    packed = []
    for kind in KINDS:
        use(monkeypatch, kind)
        memory, sizes = codec.pack_parts(values, borders)
        packed.append((memory.tobytes(), sizes.tolist()))
    assert packed[0] == packed[1]


@pytest.mark.parametrize("seed", range(12))
def test_first_values_are_unpacked_in_any_order(kind: str, seed: int) -> None:
    values, borders = make_parts(seed)
    memory, sizes = codec.pack_parts(values, borders)
    rng = np.random.default_rng(seed)
    lengths = np.diff(borders)
    chosen = rng.permutation(len(lengths))
    kept = rng.integers(0, lengths[chosen] + 1)
    targets = np.cumsum(kept) - kept
    begins = (np.cumsum(sizes) - sizes)[chosen]
    parts = Parts(memory, begins, sizes[chosen], lengths[chosen], kept, targets)
    plain = np.zeros(kept.sum(), np.uint32)
    codec.unpack_parts(parts, ValueCoding(ascending=False, added=0, limit=ANY), plain)
    ascending = np.zeros(kept.sum(), np.uint32)
    codec.unpack_parts(parts, ValueCoding(ascending=True, added=0, limit=ANY), ascending)
    expected = [values[borders[part] :][:n] for part, n in zip(chosen, kept)]
    np.testing.assert_array_equal(plain, np.concatenate(expected))
    sums = [np.cumsum(part.astype(np.int64) + 1) - 1 for part in expected]
    np.testing.assert_array_equal(ascending, np.concatenate(sums).astype(np.uint32))


def mutations(memory: np.ndarray, n: int) -> Iterator[np.ndarray]:
    rng = random.Random(0)
    for _ in range(n):
        changed = memory.copy()
        for _ in range(rng.choice([1, 1, 3, 20])):
            changed[rng.randrange(len(changed))] = rng.choice([0, 255, rng.randrange(256)])
        yield changed


@pytest.mark.parametrize("ascending", [False, True])
def test_loops_and_numpy_agree_on_damage(ascending: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    values, borders = make_parts(1, 8)
    memory, sizes = codec.pack_parts(values, borders)
    meaning = ValueCoding(ascending, added=0, limit=2**31 - 1)
    n_refused = 0
    for changed in mutations(memory, 300):
        read = []
        for kind in KINDS:
            use(monkeypatch, kind)
            out = np.zeros(len(values), np.uint32)
            try:
                codec.unpack_parts(all_of(changed, sizes, borders), meaning, out)
                read.append(out.tolist())
            except DamagedPart:
                read.append(None)
        assert read[0] == read[1]
        n_refused += read[0] is None
    assert 0 < n_refused < 300


def test_a_value_above_the_limit_is_refused(kind: str) -> None:
    values = np.array([3, 9, 300, 2], np.uint32)
    borders = np.array([0, 2, 4])
    parts = all_of(*codec.pack_parts(values, borders), borders)
    out = np.zeros(4, np.int32)
    codec.unpack_parts(parts, ValueCoding(ascending=False, added=1, limit=301), out)
    assert out.tolist() == [4, 10, 301, 3]
    with pytest.raises(DamagedPart) as error:
        codec.unpack_parts(parts, ValueCoding(ascending=False, added=1, limit=300), out)
    assert error.value.index == 1
    with pytest.raises(IndexError, match="expected parts within 3 values, got one beyond"):
        codec.unpack_parts(parts, ValueCoding(ascending=False, added=0, limit=ANY), out[:3])


@pytest.mark.parametrize("medians", [[0.5, 1, 1.001, 3], 1 + np.arange(500)[::-1] * 2**-23])
@pytest.mark.parametrize(
    ("dtype", "largest"), [(np.uint16, 1), (np.uint16, 60), (np.uint32, 70_000)]
)
def test_rank_order_in_place_is_that_of_a_sort(
    kind: str, dtype: type, largest: int, medians: list[float]
) -> None:
    counts = random_counts(300, 500, largest=largest)
    medians = np.random.default_rng(0).choice(medians, 500).astype(np.float32)
    starts = counts.indptr.astype(np.int64)
    genes = counts.indices.astype(np.int32)
    values = counts.data.astype(dtype)
    values[5::1000] = np.iinfo(dtype).max  # the other keys differ in few of the upper bits
    cells = SparseCounts(starts, genes, values)
    expected = rank_order_rows(cells, 1 / medians)
    RankOrder(1 / medians).sort(cells)
    np.testing.assert_array_equal(genes, expected.genes)
    np.testing.assert_array_equal(values, expected.counts)


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    """The same cells in shards of either order."""
    counts = random_counts(400, 50, largest=70_000)
    folder = tmp_path_factory.mktemp("ordered")
    return {
        order: write_corpus(folder / order, counts, cells_per_shard=64, order=order)
        for order in ("rank", "genes")
    }


def batches_of(manifest: Manifest, **tokens: object) -> list[Batch]:
    parsed = Tokens.model_validate(tokens)
    stream = stream_of(manifest, tokens=parsed, token_budget=120, in_rank_order=False)
    steps = list(islice(stream, stream.steps_per_epoch))
    stream.close()
    return list(chain.from_iterable(steps))


@pytest.mark.parametrize(
    "tokens",
    [
        {"tokenizer": "rank", "max_tokens": 9},
        {"tokenizer": "rank", "max_tokens": 50},
        {"tokenizer": "continuous", "max_tokens": 4},
        {"tokenizer": "binned", "max_tokens": 4},
    ],
    ids=str,
)
def test_both_orders_give_the_same_ranked_batches(
    kind: str, ordered: dict[str, Manifest], tokens: dict[str, object]
) -> None:
    both = zip(*(batches_of(manifest, **tokens) for manifest in ordered.values()))
    n_cut = 0
    for by_rank, by_genes in both:
        np.testing.assert_array_equal(by_rank.cell_ids, by_genes.cell_ids)
        np.testing.assert_array_equal(by_rank.cu_seqlens, by_genes.cu_seqlens)
        for cell, n in enumerate(by_rank.lengths):
            if n < tokens["max_tokens"] and tokens["tokenizer"] != "rank":
                continue
            n_cut += 1
            span = slice(by_rank.cu_seqlens[cell], by_rank.cu_seqlens[cell + 1])
            in_rank = [by_rank.token_ids[span], by_rank.values[span]]
            in_genes = [by_genes.token_ids[span], by_genes.values[span]]
            if tokens["tokenizer"] != "rank":  # a cell of just as many genes is not cut
                in_rank, in_genes = (
                    [array[np.argsort(pair[0])] for array in pair] for pair in (in_rank, in_genes)
                )
            np.testing.assert_array_equal(in_rank, in_genes)
    assert n_cut > 300 if tokens["tokenizer"] == "rank" else n_cut > 50


def test_genes_without_counts_leave_the_same_ranked_genes(
    kind: str, ordered: dict[str, Manifest]
) -> None:
    tokens = {"tokenizer": "continuous", "max_tokens": 24, "zero_frac": 0.5}
    both = zip(*(batches_of(manifest, **tokens) for manifest in ordered.values()))
    for by_rank, by_genes in both:
        for begin, end in zip(by_rank.cu_seqlens, by_rank.cu_seqlens[1:]):
            assert {*by_rank.token_ids[begin:end]} == {*by_genes.token_ids[begin:end]}


def test_whole_cells_have_ascending_genes(kind: str, ordered: dict[str, Manifest]) -> None:
    pairs = zip(
        *(
            batches_of(manifest, tokenizer="continuous", max_tokens=60)
            for manifest in ordered.values()
        )
    )
    for by_rank, by_genes in pairs:
        for begin, end in zip(by_rank.cu_seqlens, by_rank.cu_seqlens[1:]):
            order = np.argsort(by_rank.token_ids[begin:end])
            np.testing.assert_array_equal(
                by_genes.token_ids[begin:end], by_rank.token_ids[begin:end][order]
            )
            np.testing.assert_array_equal(
                by_genes.values[begin:end], by_rank.values[begin:end][order]
            )


def test_packed_shards_take_a_fraction_of_the_bytes(tmp_path: Path) -> None:
    counts = random_counts(600, 3000)
    counts.data = np.random.default_rng(0).geometric(0.45, counts.nnz)
    for order, most in (("rank", 2.4), ("genes", 1.2)):
        manifest = write_corpus(tmp_path / order, counts, cells_per_shard=600, order=order)
        [shard] = manifest.splits["train"].shards
        assert shard.n_bytes / shard.nnz < most


def test_loops_are_compiled_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caching = pytest.importorskip("numba.core.caching")
    compiled = import_module("cellmill.data.loops.jit").compiled
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    tried = []

    def save(self: object, name: str, data: object) -> None:
        tried.append(name)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", save)
    assert compiled("int64(int64)")(increased)(2) == 3
    assert len(tried) == 1


def increased(number: int) -> int:
    return number + 1
