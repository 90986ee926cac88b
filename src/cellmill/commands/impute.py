"""impute: predicted expression of genes that a file lacks."""

from collections.abc import Sequence
from pathlib import Path

from cellmill.config.datasets import CountsRule
from cellmill.config.options import EmbedOptions
from cellmill.data.inputs.formats import open_dataset
from cellmill.data.inputs.h5 import create_h5, write_anndata
from cellmill.evaluate.inference.embed import load_for_inference
from cellmill.evaluate.inference.files import check_input
from cellmill.evaluate.inference.impute import FileImputer


def impute(
    *,
    options: EmbedOptions,
    model: Path,
    input: Path | str,
    counts: str,
    out: Path,
    genes: Sequence[str] | None,
    counts_rule: CountsRule = "refuse",
    gene_column: str | None = None,
) -> None:
    """Write the predicted expression of `genes`, None for all that `input` lacks, to `out` (.h5ad).

    Blocks are written as they are predicted.
    """
    path = check_input(input, out)
    loaded = load_for_inference(model)
    with open_dataset(path, counts, counts_rule, gene_column) as reader:
        imputer = FileImputer(reader, loaded, model, genes, options.embed)
        with create_h5(out) as file:
            matrix = file.create_dataset("X", imputer.shape, "<f4")
            matrix.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
            start = 0
            for values in imputer.blocks():
                matrix[start : start + len(values)] = values
                file.disk.raise_if_failed()
                start += len(values)
            described = imputer.describe()
            write_anndata(file, described)
    n_cells, n_genes = imputer.shape
    about = imputer.about
    weight = f" (weight {about['decoder_weight']:g})" if "decoder_weight" in about else ""
    by = about["method"].replace("decoder", f"decoder{weight}")
    print(
        f"{path.stem}: {n_genes:,} genes of {n_cells:,} cells predicted by {by} from "
        f"{len(about['measured_genes']):,} measured genes -> {out}"
    )
    if "validation_correlation" in about:
        print(
            f"{path.stem}: on validation cells of the model, with a fifth of the genes hidden, the correlation of a "
            f"hidden gene over cells was {about['validation_correlation']:.2f} on average"
        )
    for line in imputer.describe_limits(described):
        print(f"{path.stem}: {line}")
