"""From shards to micro-batches: the path of a count in training.

`CellStream` joins two halves. `StepReader` reads packed cells step by step (`order`, `windows`,
`genes_per_cell`, `level_sampler`). `BatchMaker` turns these cells into micro-batches
(`unpacker`, `batch_tokenizer`, `micro_batches`), each a `Batch` (`batch`).

A `Tokenizer` turns the genes of cells into tokens: `tokenizer` has its contract, `builtin_tokenizers`
cellmill's classes, and `token_values` computes their values. `BatchTokenizer` chooses genes, calls the
run's tokenizer and builds a batch from its tokens.

How cells are shuffled, divided and read:

- block, lane, window: `order` defines them; windows of a lane are numbered from 0 in each epoch
- data rank: rank of a data-parallel process; lanes are divided among data ranks. `ranks` are data ranks
- step: step of an epoch, from 0; a `global_step` counts the steps of earlier epochs too
- order: the order of cells; the genes in a cell have a `gene_order`
- stream order: by step, then by lane; cells of one lane as its windows shuffle them
- window set: window number k of every lane of a data rank, read into one buffer (`windows`)
- group: consecutive small steps that are read and tokenized together (`step_reader.StepGroup`)
- span: consecutive cells of one shard, or their bytes
- packed: of cells, their genes and counts in few bits (`data.packing`), as in shards
- part: the genes, or the counts, of a packed cell
- `starts`, `stops`: first entry of each span and the entry after its last
- `offsets`: starts of rows that follow each other, and the stop of the last

What a batch has:

- cell id: index of a cell in its split or file
- gene: row in the vocabulary, as in `SparseCounts.genes`; its token id is that row + `len(SPECIAL)`
- detected gene: one with a count in the cell; the others are undetected
- rank order: order of the genes in a cell, by count divided by corpus median, descending
- position: of a token in its cell, or of a cell in its lane, from 0; the values of value kind `place`
  are positions of tokens
- level: a value of an obs column, as text; batches and the index have its code, from 1, 0 unknown. A
  missing value is a level too, the last
"""
