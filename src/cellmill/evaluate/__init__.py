"""Tasks that evaluate a model against baselines; `inference` has the model's own results on cells.

Training cells are those that the model was trained on. A fold has fitted cells (`Fold.fitted`), on which
baselines and classifiers are fitted, and tested cells (`Fold.tested`).
"""

import os

# Read by OpenMP when torch is loaded, hence set here. By default its threads spin while they wait
# for each other: with other work on the cores an embedding took 8 s in place of 1.5 s. Only waiting
# changes, no result.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
