"""Results of the runs of a sweep.

- `rows` makes the rows of results.csv.
- `scalings` makes curves from these rows: how a value changes with the size of the data or model,
  or with another number that the sweep varies.
- `scaling_law` fits a power law to a curve of the lowest validation loss.
"""
