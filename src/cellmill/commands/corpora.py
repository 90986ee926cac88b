"""Commands on data: cells of other tools, and the cost of a corpus."""

from pathlib import Path

from cellmill.config.datasets import Dataset, is_url
from cellmill.config.load import load_config
from cellmill.data.inputs.formats import open_dataset
from cellmill.data.inputs.h5 import check_h5ad, count_dtype, write_cells
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.inputs.soma import open_query
from cellmill.data.prepare.convert import convert_tokens, open_shard_folder
from cellmill.errors import ConfigError, DataError, did_you_mean
from cellmill.models.published import read_dictionaries
from cellmill.planner.corpus_cost import estimate_stage_costs


def convert(
    *,
    kind: str,
    input: Path | str,
    out: Path,
    dictionaries: Path | None = None,
    genes: Path | None = None,
    counts: str = "X",
    value_filter: str | None = None,
) -> None:
    """Write the cells of `input`, in the format `kind`, to `out`.

    `geneformer` needs `dictionaries`, `scmodelforge` needs `genes`; of a census, only cells that match
    `value_filter` are written. Raise DataError for a missing folder or wrong content.
    """
    if "://" not in str(input) and not Path(input).is_dir():
        raise DataError(f"{input}: no such folder")
    check_h5ad(out, "--out")
    if kind == "geneformer":
        assert dictionaries is not None
        tokens, vocabulary = read_dictionaries(dictionaries)
        numbers = {name: int(token) for name, token in tokens.items()}
        print(convert_tokens(Path(input), numbers, vocabulary, out))
        return
    if kind == "census":
        uri = str(input) if "://" in str(input) else Path(input).absolute().as_uri()
        source = open_query(uri, Path(input), counts, value_filter)
    else:
        assert genes is not None
        source = open_shard_folder(Path(input), genes)
    with CountsReader(source) as reader:
        n_values = 0
        max_count = 0
        for block in reader.rows():
            n_values += block.nnz
            max_count = max(max_count, int(block.data.max(initial=0)))
        write_cells(out, reader.obs, reader.var, reader.rows(), n_values, count_dtype(max_count))
        reader.warn_of_values()
        print(
            f"{out}: {reader.n_obs:,} cells x {reader.n_vars:,} genes, {n_values:,} counts",
        )


def plan_corpus(*, config: Path, corpus: str, cells: int | None, genes_per_cell: int) -> None:
    """Print the costs of the stages that make a corpus.

    By default the cells of its files are counted; `cells` assumes as many in files of equal size.
    Raise ConfigError for an unknown corpus, or for a file that is not fetched yet.
    """
    pipeline = load_config(config)
    if corpus not in pipeline.corpora:
        raise ConfigError(
            f"{config}: no corpus {corpus!r}; {did_you_mean(corpus, list(pipeline.corpora))}"
        )
    options = pipeline.corpora[corpus]
    table = pipeline.datasets(corpus)
    datasets = [table[name] for name in dict.fromkeys(options.datasets or table)]
    if cells is None:
        cells_per_dataset = [_count_cells(dataset) for dataset in datasets]
    else:
        fewest, n_larger = divmod(cells, len(datasets))
        cells_per_dataset = [fewest + int(i < n_larger) for i in range(len(datasets))]
    print(
        f"{corpus}: {sum(cells_per_dataset):,} cells of {genes_per_cell:,} genes in {len(datasets):,} files, by costs "
        "measured once on another machine, without waiting for disks:"
    )
    costs = estimate_stage_costs(cells_per_dataset, genes_per_cell, options.shard)
    print(
        f"{'stage':<12}{'jobs':>7}{'h a job':>10}{'CPU h':>10}{'GB a job':>10}{'files':>9}{'GB disk':>11}"
    )
    for cost in costs:
        print(
            f"{cost.stage:<12}{cost.jobs:>7,}{cost.hours:>10,.2f}{cost.cpu_hours:>10,.2f}{cost.rss_mb / 1e3:>10,.1f}"
            f"{cost.files:>9,}{cost.disk_gb:>11,.1f}"
        )
    print(
        f"in turn {sum(cost.hours for cost in costs):,.2f} h, {sum(cost.cpu_hours for cost in costs):,.2f} CPU h, "
        f"{sum(cost.files for cost in costs):,} files, {sum(cost.disk_gb for cost in costs):,.1f} GB; training and "
        "embedding: `cellmill plan`"
    )


def _count_cells(dataset: Dataset) -> int:
    """Open the file of a dataset and count its cells. Raise ConfigError for a URL."""
    if is_url(dataset.path):
        raise ConfigError(
            f"{dataset.path}: its cells are not known before it is fetched; give --cells"
        )
    with open_dataset(Path(dataset.path), dataset.counts) as reader:
        return reader.n_obs
