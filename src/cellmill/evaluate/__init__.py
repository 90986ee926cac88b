"""Tasks that evaluate a model against baselines. Folder `inference` has the model's results on cells.

Training cells are the cells that the model was trained on. A fold has fitted cells (`Fold.fitted`) and
tested cells (`Fold.tested`). Baselines and classifiers are fitted on the fitted cells.
"""

import os

# OpenMP reads this variable when torch is loaded, so it is set before any import of torch. By default
# the threads of OpenMP keep a core busy while they wait for each other. With other work on the cores,
# an embedding then took 8 s instead of 1.5 s. Passive waiting changes no result.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
