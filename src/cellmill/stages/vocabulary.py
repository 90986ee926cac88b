"""vocabulary: genes of a corpus, with the number of cells in which each is detected and its median there."""

from pathlib import Path

from cellmill.config.options import VocabularyOptions
from cellmill.data.corpus import build_vocabulary


def run(*, options: VocabularyOptions, cells: list[Path], out: Path) -> None:
    """Read preprocessed .h5ad files; write the vocabulary to `out` (.tsv)."""
    vocabulary = build_vocabulary(cells, options.vocabulary)
    vocabulary.write(out)
    print(f"{vocabulary.n_genes:,} genes, digest {vocabulary.digest[:12]} -> {out}")
