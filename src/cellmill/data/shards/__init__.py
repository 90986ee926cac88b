"""A corpus as shards on disk.

`divide` makes a `plan`, which gives each cell its split, its shard and its position there. `obs` joins the obs
columns of all datasets. `writer` writes the shards by the plan. `manifest` describes the shards, `index` has arrays
with an entry for each of their cells, and `reader` opens them.

`local_copies` are copies of shards on a node's own disk. `cell_digests` are kept in a model's folder.
"""
