"""From shards to micro-batches: the path of a count in training.

`CellStream` joins two halves. `StepReader` reads packed cells step by step (`order`, `windows`,
`lane_genes`); `repeats` weights cells. `BatchMaker` makes micro-batches of them (`unpacker`,
`batch_tokenizer`, `micro_batches`); `batch` is the result. `tokenizer` is the contract of tokenizers
and `tokenizers` has the built-in ones (their values: `token_values`). `batch_tokenizer` is the one of
a run, which also chooses genes.

- data rank: rank of a data-parallel process; lanes are divided among data ranks
- lane: a share of an epoch's blocks of cells, read by one data rank (`order`)
- stream order: by step, then by lane; cells of one lane as its windows shuffle them
- rank order: order of the genes in a cell, by count divided by corpus median, descending
- gene: row in the vocabulary, as in `SparseCounts.genes`; its token id is that row + `len(SPECIAL)`
- cell id: index of a cell in its split or file
- `offsets`: first entry of each row and the end of the last
- `starts`, `stops`: first entry of each run and the entry after its last
"""
