"""Splits: by content, the same wherever a cell lies; by value, whole."""

from __future__ import annotations

import numpy as np
import pytest
from small_corpus import genes_named, random_counts

from cellmill.data.shards.index import hash_cells, hash_genes
from cellmill.data.shards.plan import split_by_content, split_by_value
from cellmill.errors import DataError


def test_the_hash_of_a_cell_ignores_column_order_and_undetected_genes() -> None:
    counts, ids = random_counts(50, 30), genes_named(30)
    hashes = hash_cells(counts.indptr, counts.indices, counts.data, hash_genes(ids))
    order = np.random.default_rng(0).permutation(30)
    permuted = counts[:, order].tocsr()
    more = [*(ids[i] for i in order), "ENSG_absent"]
    again = hash_cells(permuted.indptr, permuted.indices, permuted.data.astype(np.uint16), hash_genes(more))
    np.testing.assert_array_equal(hashes, again)
    assert len(np.unique(hashes[:, 0])) == len(np.unique(hashes[:, 1])) == len(np.unique(hashes)) // 2 == 50


def test_a_changed_count_a_changed_gene_and_swapped_counts_change_the_hash() -> None:
    genes = hash_genes(genes_named(5))
    rows = [([0, 1], [2, 3]), ([0, 1], [3, 2]), ([0, 2], [2, 3]), ([0, 1], [2, 4]), ([0], [2])]
    hashes = [hash_cells(np.array([0, len(g)]), np.array(g), np.array(c), genes)[0].tolist() for g, c in rows]
    assert len({number for pair in hashes for number in pair}) == 2 * len(rows)
    both = hash_cells(np.array([0, 2, 4]), np.array([0, 1] * 2), np.array([2, 3, 70_000, 3]), genes)
    large = hash_cells(np.array([0, 2]), np.array([0, 1]), np.array([70_000, 3]), genes)  # beyond the table
    assert both.tolist() == [hashes[0], large[0].tolist()]


def test_identical_cells_stay_together_and_fractions_are_kept() -> None:
    rng = np.random.default_rng(0)
    hashes = np.repeat(rng.integers(0, 2**64, 20_000, dtype=np.uint64), 2)
    split = split_by_content(hashes, 0, 0.1, 0.2)
    np.testing.assert_array_equal(split[::2], split[1::2])
    np.testing.assert_allclose(np.bincount(split) / len(split), [0.7, 0.1, 0.2], atol=0.01)
    assert (split_by_content(hashes, 1, 0.1, 0.2) != split).mean() > 0.3


def test_an_empty_split_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"the val split of 3 cells \(1 distinct\) is empty .*shard\.val_frac"):
        split_by_content(np.zeros(3, np.uint64), 0, 1e-9, 0)
    with pytest.raises(DataError, match="the train split"):
        split_by_content(np.zeros(3, np.uint64), 0, 0.5, 0.499999)


def test_cells_of_one_value_stay_together_and_every_split_gets_a_value() -> None:
    values = np.repeat(np.array([f"donor{i}" for i in range(10)], object), 7)
    split = split_by_value(values, "donor", 0, 0.1, 0.3)
    of_donor = split.reshape(10, 7)
    assert (of_donor == of_donor[:, :1]).all()
    assert np.bincount(of_donor[:, 0]).tolist() == [6, 1, 3]
    shuffled = np.random.default_rng(0).permutation(70)
    np.testing.assert_array_equal(split_by_value(values[shuffled], "donor", 0, 0.1, 0.3), split[shuffled])
    assert any((split_by_value(values, "donor", seed, 0.1, 0.3) != split).any() for seed in (1, 2, 3))


def test_one_value_cannot_be_split() -> None:
    with pytest.raises(DataError, match="'donor' has only the value 'a', too few to split into train and val"):
        split_by_value(np.array(["a", "a"], object), "donor", 0, 0.1, 0)
    with pytest.raises(DataError, match="has only 2 values, too few to split into train and val and test"):
        split_by_value(np.array(["a", "b"], object), "donor", 0, 0.1, 0.1)


def test_values_for_training_leave_the_split_of_the_others_as_it_is() -> None:
    values = np.repeat(np.array(["control", *(f"gene{i}" for i in range(10))], object), 7)
    split = split_by_value(values, "perturbation", 3, 0.1, 0.3, ["control"])
    assert not split[:7].any()
    np.testing.assert_array_equal(split[7:], split_by_value(values[7:], "perturbation", 3, 0.1, 0.3))
    with pytest.raises(DataError, match=r"train_values: no cell of the corpus has perturbation 'contrl'; did you mean"):
        split_by_value(values, "perturbation", 3, 0.1, 0.3, ["contrl"])
    with pytest.raises(DataError, match="train_values has every value of perturbation, so none is left for val and"):
        split_by_value(values, "perturbation", 3, 0.1, 0.3, sorted(set(values)))
