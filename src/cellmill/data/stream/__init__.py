"""From shards to micro-batches: the path of a count in training.

Ranks of processes are *data ranks*: lanes and steps are shared among them. *Rank order* is that of
the genes in a cell. `offsets` have the first entry of each row and the end of the last; `starts`
and `stops` are the first entry of each run and the one after its last.

In a `Batch`, `genes` are token ids (row of the vocabulary + `len(SPECIAL)`) and `cells` are ids of
cells. In `SparseCounts`, `genes` are rows of the vocabulary.
"""
