"""Last keys of the random draws of a training (`counter_rng`), by the keys before them.

Draws with equal keys are equal. The draw that masks a token has no last key: its keys are (cell, seed,
step, position). Positions 2 to 4 would repeat the draws of a view, so a sum that masks tokens of a view
adds MASK_IN_VIEW_KEY. UNDETECTED_KEY and UNKNOWN_LEVEL_KEY are equal, so a gene's draw and a column of
the same number share bits. Other keys would change every training. After (cell, seed, step), keys from
1 << 32 are left to objectives of other packages.

Evaluation and validation draw with steps of their own (`models/objective.py`). Step 0 is both that of an
evaluation and the first of a training, so with equal seeds their cells of one id have the same random
numbers. These are different cells: ids count the cells of a split in training, and the rows of a file
in evaluation. Nothing leaks, because random numbers depend on keys, not on counts.
"""

# after (cell, seed, step)
HIDDEN_FRAC_KEY = 2  # hidden fraction of a cell's genes; in views thin and drop_thin, of its counts
HIDE_KEY = 3  # what is hidden; for whole genes the position in the cell comes before it
DROPPED_FRAC_KEY = 4  # hidden fraction of a cell's genes in view drop_thin
# after (cell, seed, step, position)
MASK_IN_VIEW_KEY = 5  # whether a token of a view is masked
# after a draw, which is then a key itself: not the same draw as a key of equal number above.
# First the draw of a token, by (cell, seed, step, position), and for masks in a view MASK_IN_VIEW_KEY
TOKEN_DROPOUT_KEY = 1
MASK_OUTCOME_KEY = 2  # whether a masked token is hidden, kept or replaced
REPLACEMENT_KEY = 3  # the random gene or value of a replaced token
# then the draw of a cell, by (cell, seed, step), in heads; the layers of blocks count from 0
HEAD_DROPOUT_KEY = -1
# after (cell, seed, step, draw number): an undetected gene
UNDETECTED_KEY = 4
# after (cell, seed, step, column): whether the model is not told a cell's level
UNKNOWN_LEVEL_KEY = 4
