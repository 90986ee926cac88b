# An HNSW index of usearch 2.26.6, hnswlib 0.8.0 or faiss 1.15.1 misses vectors that it holds if it holds many copies of each.
#
# Copies are one another's nearest neighbours and fill the links of the graph, so groups of copies lose the links between
# them. A search that starts in one group does not reach the others. It returns k vectors of other groups, at a distance, and no
# hint. Cells without counts, or of few counts, give such vectors. Adding each vector once, and keeping the list of its copies beside
# the index, avoids it.
#
# Seen, share of 50 vectors whose nearest neighbour among 200 copies of each is found at distance 0, added in order: usearch
# .70, hnswlib .62, faiss .70; shuffled: .90, .80, .68. An exact search finds 1.
# Source: our own run, one thread. Guess before it: above .99, as on vectors that all differ.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check usearch==2.26.6 hnswlib==0.8.0 faiss-cpu==1.15.1
"$folder/venv/bin/python" - <<'PYTHON'
import importlib.metadata

import faiss
import hnswlib
import numpy as np
from usearch.index import Index

rng = np.random.default_rng(0)
vectors = rng.normal(size=(50, 128)).astype(np.float32)
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
copies = np.repeat(vectors, 200, axis=0)


def search_usearch():
    index = Index(ndim=128, metric="cos", dtype="f32")
    index.add(np.arange(len(copies)), copies, threads=1)
    return np.array(index.search(vectors, 15).distances)[:, 0]


def search_hnswlib():
    index = hnswlib.Index(space="cosine", dim=128)
    index.init_index(max_elements=len(copies), ef_construction=200, M=16, random_seed=0)
    index.set_num_threads(1)
    index.add_items(copies)
    index.set_ef(64)
    return index.knn_query(vectors, 15)[1][:, 0]


def search_faiss(index):
    faiss.omp_set_num_threads(1)
    index.add(copies)
    return 1 - index.search(vectors, 15)[0][:, 0]


graph = faiss.IndexHNSWFlat(128, 16, faiss.METRIC_INNER_PRODUCT)
graph.hnsw.efSearch = 64
distances = {
    "usearch": search_usearch(),
    "hnswlib": search_hnswlib(),
    "faiss-cpu": search_faiss(graph),
    "exact": search_faiss(faiss.IndexFlatIP(128)),
}
for name, distance in distances.items():
    found = (distance < 1e-5).mean()
    version = importlib.metadata.version(name) if name != "exact" else ""
    print(f"{name} {version}: {found:.2f} of the vectors found")
    assert found == 1 if name == "exact" else found < 0.9, name
PYTHON
