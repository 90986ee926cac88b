"""The page over all runs and corpora.

The modules, in the order in which a page is made:

- `collect` reads the files of runs and corpora. `schemas` says what each JSON file must hold.
  `remake_commands` lists the Snakemake commands that make each file again.
- `verdicts` lists how a run compares with the best baselines. `ranking` compares runs with each
  other. `standings` joins both for each run and dataset.
- `advice` finds what to change in a run. `overview` writes the sentences of the first section from
  the standings and the advice.
- `task_table` makes the table of a task in one run, and `side_by_side` the table of a task in
  several runs. `text` formats single values as text.
- `training` makes the values and charts of the section on training. `checkpoints` makes charts of
  scores over the steps of a run's evaluated checkpoints.
- `sweeps` makes the rows and curves of a sweep. The charts of these curves are in
  `drawing/curves.py`.
- `drawing` makes all charts.
- `page` renders page.html, with its `sections`, from the values and charts. macros.html has the
  macros that several sections use.
"""
