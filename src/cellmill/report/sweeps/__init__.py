"""Results of the runs of a sweep side by side.

`rows` makes the rows of results.csv; `scalings` makes curves over an axis of sizes from them, with
the `scaling_law` of the validation loss.
"""
