"""Commands on data: cells of other tools, and the cost of a corpus."""

from pathlib import Path

from cellmill.config.datasets import is_url
from cellmill.config.load import load_config
from cellmill.data.inputs.formats import open_dataset
from cellmill.data.inputs.h5 import check_h5ad, count_dtype, write_cells
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.inputs.soma import open_query
from cellmill.data.prepare.convert import convert_tokens, open_shard_folder
from cellmill.errors import ConfigError, DataError, did_you_mean
from cellmill.models.published import read_dictionaries
from cellmill.planner.corpus_cost import estimate_corpus


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

    For a census, only cells that fulfil `value_filter`.
    """
    if "://" not in str(input) and not Path(input).is_dir():
        raise DataError(f"{input}: no such folder")
    check_h5ad(out, "--out")
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
            n_values = n_values + block.nnz
            largest = max(largest, int(block.data.max(initial=0)))
        write_cells(out, reader.obs, reader.var, reader.rows(), n_values, count_dtype(largest))
        reader.warn_of_values()
        print(
            f"{out}: {reader.n_obs:,} cells x {reader.n_vars:,} genes, {n_values:,} counts",
            flush=True,
        )


def plan_corpus(*, config: Path, corpus: str, cells: int | None, genes_per_cell: int) -> None:
    """Print the plan of a corpus, with the cells of its files, or `cells` in even files."""
    pipeline = load_config(config)
    if corpus not in pipeline.corpora:
        raise ConfigError(
            f"{config}: no corpus {corpus!r}; {did_you_mean(corpus, list(pipeline.corpora))}"
        )
    options = pipeline.corpora[corpus]
    datasets = pipeline.datasets(corpus)
    datasets = {name: datasets[name] for name in options.datasets or datasets}
    if cells is not None:
        sizes = [cells // len(datasets) + (i < cells % len(datasets)) for i in range(len(datasets))]
    else:
        sizes = []
        for dataset in datasets.values():
            if is_url(dataset.path):
                raise ConfigError(
                    f"{dataset.path}: its cells are not known before it is fetched; give --cells"
                )
            with open_dataset(Path(dataset.path), dataset.counts) as reader:
                sizes.append(reader.n_obs)
    print(
        f"{corpus}: {sum(sizes):,} cells of {genes_per_cell:,} genes in {len(sizes):,} files, by costs measured once "
        "on another machine, without waiting for disks:"
    )
    costs = estimate_corpus(sizes, genes_per_cell, options.shard)
    print(
        f"{'stage':<12}{'jobs':>7}{'h a job':>10}{'CPU h':>10}{'GB a job':>10}{'files':>9}{'GB disk':>11}"
    )
    for cost in costs:
        print(
            f"{cost.stage:<12}{cost.jobs:>7,}{cost.hours:>10,.2f}{cost.cpu_hours:>10,.2f}{cost.rss_gb:>10,.1f}"
            f"{cost.files:>9,}{cost.disk_gb:>11,.1f}"
        )
    print(
        f"in turn {sum(cost.hours for cost in costs):,.2f} h, {sum(cost.cpu_hours for cost in costs):,.2f} CPU h, "
        f"{sum(cost.files for cost in costs):,} files, {sum(cost.disk_gb for cost in costs):,.1f} GB; training and "
        "embedding: `cellmill plan`"
    )
