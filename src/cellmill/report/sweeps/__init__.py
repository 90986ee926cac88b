"""Results of the runs of a sweep, side by side.

`rows` makes the rows of results.csv. From these, `scalings` makes curves over the axes of numbers,
with the `scaling_law` of the lowest validation loss.
"""
