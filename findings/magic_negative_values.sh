#!/usr/bin/env bash
# magic-impute 3.0.0 with solver="approximate" writes negative expression from counts.
#
# The imputed values are computed on principal components and rotated back, so where a gene is rare they fall a little
# below zero: about one value in a hundred here. The default, solver="exact", diffuses the counts themselves and
# keeps them at zero or above. Either way hardly a zero is left. Who reads "negative" as "scaled" is misled.
#
# Seen: exact: 69% zeros before, 0.07% after, none negative; approximate: no zeros, 1.2% negative, the least -0.018.
# Source: our own run; nothing was read of other reports. Guess before it: no value is negative.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check magic-impute==3.0.0 "numpy<2" "scipy<1.14"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import magic
import numpy as np

print("magic-impute", version("magic-impute"))
random = np.random.default_rng(0)
counts = random.poisson(random.gamma(0.5, 1, 200) * random.gamma(4, 0.25, (300, 1))).astype(float)
counts = counts[:, counts.sum(axis=0) > 0]
negative = {}
for solver in ("exact", "approximate"):
    imputed = np.asarray(magic.MAGIC(verbose=0, n_jobs=1, solver=solver, random_state=0).fit_transform(counts))
    negative[solver] = float((imputed < 0).mean())
    print(f"{solver}: zeros {(counts == 0).mean():.2%} -> {(imputed == 0).mean():.2%}, negative {negative[solver]:.2%}")
same = negative["exact"] == 0 and 0 < negative["approximate"] < 0.1
raise SystemExit(0 if same else "the behaviour has changed")
PYTHON
