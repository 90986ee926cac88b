"""From shards to micro-batches: the path of a count in training.

Ranks of processes are *data ranks*: lanes and steps are shared among them. *Rank order* is that of
the genes in a cell. `offsets` have the first entry of each row and the end of the last; `starts`
and `stops` are the first entry of each run and the one after its last.

A gene is named by its row in the vocabulary, as in `SparseCounts.genes`; its token id is that row +
`len(SPECIAL)`. A cell id is the index of the cell in its split or file.
"""
