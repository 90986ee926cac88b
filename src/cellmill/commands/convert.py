"""convert: cells that other tools keep in formats of their own, as .h5ad for the table of datasets and `embed`."""

from pathlib import Path

from cellmill.data.counts_reader import CountsReader
from cellmill.data.counts_writer import count_dtype, write_cells
from cellmill.data.inputs.scmodelforge import open_shard_folder
from cellmill.data.inputs.soma import open_query
from cellmill.data.token_dataset import convert_tokens
from cellmill.errors import ConfigError, DataError
from cellmill.models.published.geneformer import read_dictionaries


def run(
    *,
    kind: str,
    input: Path | str,
    out: Path,
    dictionaries: Path | None = None,
    genes: Path | None = None,
    counts: str = "X",
    value_filter: str | None = None,
) -> None:
    """Write the cells of `input`, a folder of the format `kind`, to `out`. Raises DataError if it is another.

    The `input` of a census may be a URI; of its cells those are read that fulfil `value_filter`.
    """
    if "://" not in str(input) and not Path(input).is_dir():
        raise DataError(f"{input}: no such folder")
    if out.suffix != ".h5ad":
        raise ConfigError(f"{out}: expected a name that ends in .h5ad")
    if kind == "geneformer":
        assert dictionaries is not None
        tokens, vocabulary = read_dictionaries(dictionaries)
        numbers = {name: int(token) for name, token in tokens.items()}
        print(convert_tokens(Path(input), numbers, vocabulary, out), flush=True)
        return
    if kind == "census":
        uri = str(input) if "://" in str(input) else Path(input).absolute().as_uri()
        source = open_query(uri, Path(input), counts, value_filter)
    else:
        assert genes is not None
        source = open_shard_folder(Path(input), genes)
    with CountsReader(source) as reader:
        n_values = largest = 0
        for block in reader.rows():
            n_values, largest = n_values + block.nnz, max(largest, int(block.data.max(initial=0)))
        write_cells(out, reader.obs, reader.var, reader.rows(), n_values, count_dtype(largest))
        reader.warn_if_rounded()
        print(f"{out}: {reader.n_obs:,} cells x {reader.n_vars:,} genes, {n_values:,} counts", flush=True)
