"""Held-out cells of a dataset: cells that neither the model nor its ancestors were trained on.

Held-out cells are in no training or validation shard of the model's corpus or of its ancestors'
corpora; digests in the model's folder stand in for shards of ancestors that are not here. A cell is
recognised by dataset and obs name; under any name by its counts of the vocabulary's genes; and in
digests by its barcode. If the file has all genes, different cells with few counts may be equal by
chance; these do not count as held out either.
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
    """Finds held-out cells of `datasets`, by the training and validation cells of the model and its
    ancestors.

    Cells of `manifests` are read from shards. Of other corpora, `listed` has digests by fingerprint.
    Raises DataError for a changed shard.
    """

    def __init__(
        self,
        manifests: Sequence[Manifest],
        datasets: Iterable[str],
        listed: Mapping[str, CorpusDigests] = MappingProxyType({}),
    ) -> None:
        self.names: dict[str, set[str]] = {name: set() for name in datasets}  # obs names by dataset
        for manifest in manifests:
            stamps = stamp_files(manifest)
            if verify_changed(manifest, stamps):
                # so that the next evaluation or training need not hash them
                record_verified(manifest, stamps)
            for dataset, name in read_cell_names(manifest, TRAINING_SPLITS):
                if dataset in self.names:
                    self.names[dataset].add(name)
        by_fingerprint = {manifest.fingerprint: manifest for manifest in manifests}
        self.corpora = [HashedCorpus.read(manifest) for manifest in by_fingerprint.values()]
        self._listed = [listed[name] for name in sorted(listed.keys() - by_fingerprint.keys())]
        self.corpora += [HashedCorpus.from_digests(corpus) for corpus in self._listed]

    def find_held_out(self, dataset: str, reader: CountsReader) -> tuple[np.ndarray, int]:
        """Mask, bool `(n_obs,)`, of the held-out cells, and the number of copies of training cells
        under other names, by counts or barcodes. Prints how many copies were found by each.
        """
        has_new_name = ~reader.obs_names.isin([*self.names[dataset]])
        copies = find_equal_cells(reader, self.corpora, has_new_name)
        near = has_new_name & ~copies & find_barcodes(reader, self._listed)
        for mask, relation in (
            (copies, "are equal to training or validation cells of other names"),
            (near, "have barcodes of a training sample of a model before this one"),
        ):
            if mask.any():
                print(f"{dataset}: {int(mask.sum()):,} cells {relation}: not held out", flush=True)
        for line in describe_unfindable_cells(reader, self.corpora, self._listed):
            print(f"{dataset}: warning: {line}", flush=True)
        copies |= near
        return has_new_name & ~copies, int(copies.sum())
