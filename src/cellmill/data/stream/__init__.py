"""From shards to micro-batches: the path of a count in training.

`CellStream` joins two halves. `StepReader` reads packed cells step by step (`order`, `windows`,
`genes_per_cell`); `repeats` weights cells. `BatchMaker` makes micro-batches of them (`unpacker`,
`batch_tokenizer`, `micro_batches`); `batch` is the result.

A `Tokenizer` (`tokenizer`, the contract) makes tokens of the genes of cells; `builtin_tokenizers` are
the classes of cellmill's, whose values `token_values` computes. `BatchTokenizer` chooses genes, calls the
run's tokenizer, and makes a batch of its tokens.

- data rank: rank of a data-parallel process; lanes are divided among data ranks
- packed: of cells, their genes and counts in few bits (`data.packing`), as in shards
- block: contiguous cells of a shard, read at once
- run: consecutive cells of one shard
- lane: a share of an epoch's blocks of cells, read by one data rank (`order`)
- order: the order of cells; the genes in a cell have a `gene_order`
- window: blocks of a lane whose cells are shuffled together
- group: small steps that are read and tokenized together (`StepGroup`)
- part: the genes, or the counts, of a packed cell; in functions that join or cut, some of the cells
- stream order: by step, then by lane; cells of one lane as its windows shuffle them
- rank order: order of the genes in a cell, by count divided by corpus median, descending
- gene: row in the vocabulary, as in `SparseCounts.genes`; its token id is that row + `len(SPECIAL)`
- cell id: index of a cell in its split or file
- level: one of the texts of an obs column; batches and the index have its code, from 1, 0 unknown
- `starts`, `stops`: first entry of each run and the entry after its last
- `offsets`: starts of rows that follow each other, and the stop of the last
"""
