"""Held-out cells of a dataset: cells that neither the model nor its ancestors were trained on.

A held-out cell is in no training or validation shard of the model or of an ancestor. If the shards of an
ancestor are not here, the digests in the folder of the model stand in for them.

A training cell is recognised in three ways: by the names of dataset and cell, by its counts of the
vocabulary's genes, and, in digests, by its barcode. Two different cells with few counts may have equal
counts by chance. Such a cell does not count as held out either.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from cellmill.data.inputs.reader import CountsReader
from cellmill.data.shards.cell_digests import CorpusDigests
from cellmill.data.shards.manifest import (
    TRAINING_SPLITS,
    Manifest,
    record_verified,
    stamp_files,
    verify_changed,
)
from cellmill.evaluate.seen.copies import find_barcodes, find_equal_cells
from cellmill.evaluate.seen.corpus_hashes import HashedCorpus
from cellmill.evaluate.seen.seen_cells import describe_unfindable_cells
from cellmill.evaluate.training_shards import read_cell_names


class HeldOutCheck:
    """Finds the held-out cells of `datasets`.

    The training and validation cells of the model and its ancestors are read from the shards of
    `manifests`. For corpora without shards, `listed` has digest lists by fingerprint. Raises DataError for
    a changed shard.
    """

    def __init__(
        self,
        manifests: Sequence[Manifest],
        datasets: Iterable[str],
        listed: Mapping[str, CorpusDigests] = MappingProxyType({}),
    ) -> None:
        # obs names of training and validation cells, by dataset
        self.names: dict[str, set[str]] = {name: set() for name in datasets}
        for manifest in manifests:
            stamps = stamp_files(manifest)
            if verify_changed(manifest, stamps):
                # recorded, so that the next evaluation or training need not hash the shards
                record_verified(manifest, stamps)
            for dataset, name in read_cell_names(manifest, TRAINING_SPLITS):
                if dataset in self.names:
                    self.names[dataset].add(name)
        by_fingerprint = {manifest.fingerprint: manifest for manifest in manifests}
        self.corpora = [HashedCorpus.read(manifest) for manifest in by_fingerprint.values()]
        self._listed = [listed[name] for name in sorted(listed.keys() - by_fingerprint.keys())]
        self.corpora += [HashedCorpus.from_digests(corpus) for corpus in self._listed]

    def find_held_out(self, dataset: str, reader: CountsReader) -> tuple[np.ndarray, int]:
        """Find the held-out cells of a dataset.

        Returns a mask of the held-out cells, `(n_obs,)` bool, and the number of copies. Copies are cells
        that have other names than a training cell, and equal counts or the same barcode. Prints how many
        copies were found by counts and by barcodes.
        """
        has_new_name = ~reader.obs_names.isin([*self.names[dataset]])
        is_equal = find_equal_cells(reader, self.corpora, has_new_name)
        is_near = has_new_name & ~is_equal & find_barcodes(reader, self._listed)
        for mask, relation in (
            (is_equal, "are equal to training or validation cells of other names"),
            (is_near, "have barcodes of a training sample of a model before this one"),
        ):
            if mask.any():
                print(f"{dataset}: {int(mask.sum()):,} cells {relation}: not held out", flush=True)
        for line in describe_unfindable_cells(reader, self.corpora, self._listed):
            print(f"{dataset}: warning: {line}", flush=True)
        is_copy = is_equal | is_near
        return has_new_name & ~is_copy, int(is_copy.sum())
