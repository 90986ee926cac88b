"""Last keys of the random draws of a training (`counter_rng`), by the keys before them.

Draws with equal keys are equal. The draw that masks a token has no last key: its keys are (cell, seed,
step, position), which a draw of a view may have too. So a sum that masks tokens of a view adds
MASK_IN_VIEW. UNDETECTED and UNKNOWN are equal, so a gene's draw and a column of the same number share
bits. Other keys would change every training.
"""

# after (cell, seed, step)
HIDDEN_FRAC = 2  # hidden fraction of a cell's genes or, in views thin and drop_thin, of its counts
HIDE = 3  # what is hidden; for whole genes the position in the cell comes before it
DROPPED_FRAC = 4  # hidden fraction of a cell's genes in view drop_thin
# after (cell, seed, step, position)
TOKEN_DROPOUT = 1
SHOWN_CONTENT = 2  # whether a masked token shows its own content, random content, or none
CONTENT = 3  # the random content
MASK_IN_VIEW = 5  # whether a token of a view is masked
# after (cell, seed, step), in layers whose rows are cells; those of blocks count from 0
HEAD_DROPOUT = -1
UNDETECTED = 4  # after (cell, seed, step, draw number): an undetected gene
UNKNOWN = 4  # after (cell, seed, step, column): whether the model is not told a cell's level
