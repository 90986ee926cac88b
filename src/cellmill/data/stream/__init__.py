"""From shards to micro-batches: the path of a count in training.

`CellStream` joins two halves. `StepReader` reads the packed cells of each step. Modules `order`,
`level_sampler`, `windows` and `genes_per_cell` belong to this half. `BatchMaker` turns the packed cells into
micro-batches, and each micro-batch is a `Batch`. Modules `unpacker`, `batch_tokenizer`, `micro_batches` and
`batch` belong to this half.

A `Tokenizer` turns the genes of cells into tokens. Module `tokenizer` has its contract,
`builtin_tokenizers` has cellmill's own classes, and `token_values` computes their values. `BatchTokenizer`
chooses the genes, calls the run's tokenizer and builds a batch from the tokens.

Words for how cells are shuffled, divided and read:

- block, lane, window: module `order` defines them. The windows of a lane are numbered from 0 in each epoch
- data rank: the rank of a data-parallel process. Lanes are divided among data ranks. `ranks` are data ranks
- step: a step of an epoch, numbered from 0. A `global_step` counts the steps of earlier epochs too
- order: the order of cells. The order of the genes in a cell is called `gene_order`
- stream order: cells are sorted by step, then by lane. Cells of one step and lane stay as their windows
  shuffle them
- window set: window number k of every lane of a data rank, read into one buffer (module `windows`)
- group: consecutive small steps that are read and tokenized together (`step_reader.StepGroup`)
- span: consecutive cells of one shard, or the bytes of these cells
- packed: cells are packed if their genes and counts are stored in few bits (`data.packing`), as in shards
- part: the genes of a packed cell, or its counts
- `starts`, `stops`: the index of each span's first entry, and the index after its last entry
- `offsets`: the index of the first entry of each row, if rows follow each other. The last offset is the
  number of entries

Words for what a batch has:

- cell id: the index of a cell in its split or file
- gene: a row of the vocabulary, as in `SparseCounts.genes`. The token id of a gene is this row +
  `len(SPECIAL)`
- detected gene: a gene with a count in the cell. All other genes are undetected
- rank order: the genes of a cell sorted by count divided by corpus median, largest first
- position: the index of a token in its cell, or of a cell in its lane, from 0. The values of value kind
  `place` are positions of tokens
- level: a value of an obs column, as text. Batches and the index have its code, from 1. Code 0 is an unknown
  value. In a column with missing values, the last level stands for them
"""
