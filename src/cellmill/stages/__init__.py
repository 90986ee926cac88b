"""The function of each stage of the workflow, named like its rule. Stages compose the other rooms.

`data` makes shards, `plan` and `train` a checkpoint, `export` a model of it; `cells` has what a
model does to cells of a file, `atlas` maps cells to others, `evaluate` scores, `report` pages.
"""
