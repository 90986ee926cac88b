"""Last keys of the random draws of a training (`counter_rng`), by the keys before them.

Draws with equal keys are equal. The draw that masks a token has no last key: its keys are (cell, seed,
step, position), which a draw of a view may have too. So a sum that masks tokens of a view adds
MASK_IN_VIEW_KEY. UNDETECTED_KEY and UNKNOWN_LEVEL_KEY are equal, so a gene's draw and a column of the
same number share bits. Other keys would change every training. After (cell, seed, step), keys from
1 << 32 are left to objectives of other packages.
"""

# after (cell, seed, step)
HIDDEN_FRAC_KEY = 2  # hidden fraction of a cell's genes; in views thin and drop_thin, of its counts
HIDE_KEY = 3  # what is hidden; for whole genes the position in the cell comes before it
DROPPED_FRAC_KEY = 4  # hidden fraction of a cell's genes in view drop_thin
# after (cell, seed, step, position)
TOKEN_DROPOUT_KEY = 1
MASK_OUTCOME_KEY = 2  # whether a masked token is hidden, kept or replaced
REPLACEMENT_KEY = 3  # the random gene or value of a replaced token
MASK_IN_VIEW_KEY = 5  # whether a token of a view is masked
# after (cell, seed, step), in layers whose rows are cells; those of blocks count from 0
HEAD_DROPOUT_KEY = -1
# after (cell, seed, step, draw number): an undetected gene
UNDETECTED_KEY = 4
# after (cell, seed, step, column): whether the model is not told a cell's level
UNKNOWN_LEVEL_KEY = 4
