#!/usr/bin/env bash
# An index of usearch 2.26.6 with dtype="i8" forgets the lengths of vectors, also with metric="l2sq": a vector, its double and
# ten times it are at distance 0 of one another. There is no warning, and the index answers with any of them.
#
# Vectors of float32 are divided by their length before they become bytes, which suits the metric "cos" alone. Embeddings whose
# lengths differ so get other neighbours: on 100,000 vectors of 128 numbers in clusters, .86 of the 15 nearest were found, by
# faiss-cpu 1.15.1 with 8 bits .97. The other types, f32, f16 and bf16, keep lengths.
#
# Seen, squared distances of v to v, 2v and 10v, with 128 numbers: f16 0, 116.3, 9,419.9; i8 0, 0, 0.
# Source: our own run, one thread. Guess before it: the rounding of 8 bits, a few percent of the distances.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check usearch==2.26.6 numpy
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from usearch.index import Index

vector = np.random.default_rng(0).normal(size=128).astype(np.float32)
multiples = np.stack([vector, 2 * vector, 10 * vector])
expected = ((multiples - vector) ** 2).sum(axis=1)
print("usearch", version("usearch"), "expected", expected.round(1))
distances = {}
for dtype in ("f16", "i8"):
    index = Index(ndim=128, metric="l2sq", dtype=dtype)
    index.add(np.arange(3), multiples, threads=1)
    distances[dtype] = np.sort(np.array(index.search(vector, 3).distances))
    print(dtype, distances[dtype].round(1))
same = np.allclose(distances["f16"], expected, rtol=1e-2) and (distances["i8"] == 0).all()
raise SystemExit(0 if same else "the behaviour has changed")
PYTHON
