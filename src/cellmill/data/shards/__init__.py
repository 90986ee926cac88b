"""A corpus as shards on disk.

`plan` gives each cell its split, shard and position (`obs` joins the columns of datasets), and
`writer` writes the shards. `manifest` describes them, `index` has arrays over their cells, and `reader`
opens them. `local_copies` are copies on a node's disk, `cell_digests` travel with a model.
"""
