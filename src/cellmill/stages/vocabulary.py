"""vocabulary: the genes of a corpus, in how many cells each is detected, and its median there."""

from __future__ import annotations

from pathlib import Path

from cellmill.config.options import VocabularyOptions
from cellmill.data.corpus import build_vocabulary


def run(*, options: VocabularyOptions, cells: list[Path], out: Path) -> None:
    """Reads preprocessed .h5ad files, writes the vocabulary to `out` (.tsv)."""
    vocabulary = build_vocabulary(cells, options.vocabulary.min_cells, options.vocabulary.max_genes)
    vocabulary.write(out)
    print(f"{vocabulary.n_genes:,} genes, digest {vocabulary.digest[:12]} -> {out}")
