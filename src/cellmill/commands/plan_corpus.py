"""plan_corpus: jobs, hours, memory, files and bytes of making a corpus, before any of it is made."""

from pathlib import Path

from cellmill.config.input_url import is_url
from cellmill.config.load import load_config
from cellmill.data.dataset_file import open_dataset
from cellmill.errors import ConfigError, did_you_mean
from cellmill.planner.corpus_cost import StageCost, corpus_cost


def run(*, config: Path, corpus: str, cells: int | None, genes_per_cell: int) -> None:
    """Print the plan of a corpus of the configuration, with the cells of its files, or `cells` in even files."""
    pipeline = load_config(config)
    if corpus not in pipeline.corpora:
        raise ConfigError(f"{config}: no corpus {corpus!r}; {did_you_mean(corpus, list(pipeline.corpora))}")
    options, datasets = pipeline.corpora[corpus], pipeline.datasets(corpus)
    datasets = {name: datasets[name] for name in options.datasets or datasets}
    if cells is None:
        sizes = [_cells_of(dataset.path, dataset.counts) for dataset in datasets.values()]
    else:
        sizes = [cells // len(datasets) + (i < cells % len(datasets)) for i in range(len(datasets))]
    print(
        f"{corpus}: {sum(sizes):,} cells of {genes_per_cell:,} genes in {len(sizes):,} files, by costs measured once "
        "on another machine, without waiting for disks:"
    )
    costs = corpus_cost(sizes, genes_per_cell, options.preprocess, options.shard)
    print(f"{'stage':<12}{'jobs':>7}{'h a job':>10}{'CPU h':>10}{'GB a job':>10}{'files':>9}{'GB disk':>11}")
    for cost in costs:
        print(_line(cost))
    print(
        f"in turn {sum(cost.hours for cost in costs):,.2f} h, {sum(cost.cpu_hours for cost in costs):,.2f} CPU h, "
        f"{sum(cost.files for cost in costs):,} files, {sum(cost.gigabytes for cost in costs):,.1f} GB; training and "
        "embedding: `cellmill plan`"
    )


def _cells_of(path: str, counts: str) -> int:
    if is_url(path):
        raise ConfigError(f"{path}: its cells are not known before it is fetched; give --cells")
    with open_dataset(Path(path), counts) as reader:
        return reader.n_obs


def _line(cost: StageCost) -> str:
    return (
        f"{cost.stage:<12}{cost.jobs:>7,}{cost.hours:>10,.2f}{cost.cpu_hours:>10,.2f}{cost.rss_gb:>10,.1f}"
        f"{cost.files:>9,}{cost.gigabytes:>11,.1f}"
    )
