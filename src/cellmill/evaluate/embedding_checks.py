"""Checks of an embedding before it is used: what the model knows of the cells, and what limits the vectors."""

from pathlib import Path

from cellmill.config.run import Embed
from cellmill.data.genes import lost_counts
from cellmill.errors import DataError
from cellmill.evaluate.embed import Embedding
from cellmill.evaluate.gene_coverage import FEW


def check_coverage(path: Path, embedding: Embedding, section: Embed) -> None:
    """Raise DataError when too little of the file is known to the model, or of the model's genes in the file."""
    if embedding.coverage_frac < (least := section.min_coverage_frac):
        raise DataError(
            f"{path}: {embedding.coverage_frac:.1%} of its counts fall on genes that the model knows, "
            f"embed.min_coverage_frac is {least:g}; use a model of these genes, or lower it (--min-coverage-frac)"
        )
    if embedding.genes.expressed_frac < (least := section.min_expressed_frac):
        raise DataError(
            f"{path}: it measures {embedding.genes}; embed.min_expressed_frac is {least:g}; use a model of these "
            "genes, or lower it (--min-expressed-frac)"
        )


def limits_of(embedding: Embedding) -> list[str]:
    """Lines on what limits the use of the vectors."""
    lines = []
    if line := lost_counts(embedding.lost_frac, embedding.lost_names):
        lines.append(line)
    if embedding.genes.expressed_frac < FEW:
        lines.append(f"warning: it measures {embedding.genes}: compare its vectors with each other only")
    if names := ", ".join(embedding.absent_columns):
        lines.append(
            f"warning: it has no obs column {names}, from which the model makes a token of each cell; it takes that "
            "of an unknown value"
        )
    if n := embedding.n_without_genes:
        lines.append(f"{n:,} cells have no gene that the model knows: their rows are NaN")
    return lines
