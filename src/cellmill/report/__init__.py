"""The page over all runs and corpora.

In the order in which a page is made:

- `collect` reads the files of runs and corpora; `schemas` says what each JSON file must hold, and
  `remake_commands` how Snakemake makes it again.
- `verdicts` compares a run with the baselines, `ranking` compares runs with each other. `standings`
  has both for each run and dataset.
- `overview` puts them into the sentences of the first section, with one piece of `advice` per run.
- `task_table` and `side_by_side` make the tables of a task, in one run and in several; `text` makes
  text of values.
- `training` and `checkpoints` make the values and charts of further sections. `sweeps` makes the
  values of the section on sweeps, which `drawing/curves.py` draws.
- `drawing` makes the charts.
- `page` renders page.html and its `sections` from all of these; macros.html has what they share.
"""
