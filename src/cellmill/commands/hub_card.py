"""Card of an exported model on a hub: data, results and options of its run, if it has one."""

import re
from pathlib import Path
from typing import Any

import yaml

from cellmill.config.load import read_model_config
from cellmill.errors import ConfigError, DataError
from cellmill.report.collect import ReportedCorpus, ReportedRun, read_corpus, read_run
from cellmill.runs.results import Evaluation, Row


def write_card(model: Path, licence: str) -> tuple[str, Path | None]:
    """Write the card of an exported model, with its licence; return also the file of its results.

    The card of a run's model also has its data, its results next to baselines, and options to rerun
    it. Results of other weights, such as another export of the run, are left out with a warning. Raise
    ConfigError if the licence is no identifier, DataError if the folder has no card.
    """
    card = _read_card(model, licence)
    folder = model.resolve().parent
    if not (folder / "train" / "run.json").is_file():
        return card, None
    run = read_run(folder)
    metrics = folder / "evaluate" / "metrics.json"
    evaluation = run.evaluation
    weights = read_model_config(model / "config.json")["weights_sha256"]
    if evaluation and evaluation.model.get("digest", weights) != weights:
        print(f"warning: {metrics} is of other weights than {model}: left out; run evaluate again")
        evaluation = None
    record = run.run_record
    corpus = None
    if record and record.manifest:
        # of the working directory of the training, which is mostly a folder above the run
        cells = Path(record.manifest).parent.parent / "cells"
        here, *above = [cells, *(parent / cells for parent in folder.parents)]
        corpora = [path.parent for path in (*above, here) if path.exists()]
        corpus = read_corpus(corpora[0]) if corpora else None
    lines = [card.rstrip("\n")]
    if corpus is not None:
        lines += _describe_data(corpus)
    lines += _describe_results(evaluation)
    lines += _describe_rerun(run, corpus)
    return "\n".join(lines), metrics if evaluation else None


def _read_card(model: Path, licence: str) -> str:
    """Read the card of the export and set its licence."""
    if not licence.replace("-", "").replace(".", "").isalnum():
        raise ConfigError(
            f"--licence: expected an identifier of the hub, such as apache-2.0 or other, got {licence!r}"
        )
    path = model / "README.md"
    try:
        card = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; export the model again (consolidate)") from None
    card = re.sub(r"(?m)^license: .*\n", "", card, count=1)  # a card that was pulled has one
    library = "library_name: cellmill\n"
    return card.replace(library, f"{library}license: {licence}\n", 1)


def _describe_data(corpus: ReportedCorpus) -> list[str]:
    """Write a table of the datasets that the run was trained on."""
    manifest = corpus.manifest
    levels = manifest and manifest.obs_levels.get("dataset")
    lines = [
        "",
        "## Data",
        "| dataset | source | licence | SHA-256 of the input | cells |",
        "|---|---|---|---|---|",
    ]
    rounded: list[str] = []
    for dataset in corpus.qc_reports:
        name = dataset.dataset
        if levels and name not in levels.levels:
            continue  # no cell of it was trained on
        source = dataset.source
        texts = (name, source.source or "not said", source.licence or "not said")
        cells = " | ".join(map(_format_cell, texts))
        lines.append(f"| {cells} | `{source.sha256}` | {dataset.cells.after:,} |")
        if source.counts_rule:
            rounded.append(
                f"{_format_cell(name)}: {source.n_rounded:,} estimated counts had fractions and were "
                f"rounded (`counts_rule: {source.counts_rule}`)."
            )
    if rounded:
        lines += ["", *rounded]
    fingerprint = manifest.fingerprint if manifest else "unknown"
    return [*lines, "", f"Fingerprint of the shards: `{fingerprint}`."]


def _describe_results(evaluation: Evaluation | None) -> list[str]:
    """Write a table of each task, with its baselines among the rows, and its verdicts."""
    lines = ["", "## Results"]
    if evaluation is None:
        return [*lines, "Not evaluated."]
    for name, dataset in evaluation.datasets.items():
        lines += ["", f"{_format_cell(name)}: {dataset.n_scored:,} cells ({dataset.cells})."]
        for task, result in dataset.tasks.items():
            lines += _format_table(task, result.rows)
            if result.sentences:
                lines += ["", *result.sentences]
    return lines


def _describe_rerun(run: ReportedRun, corpus: ReportedCorpus | None) -> list[str]:
    """Write the environment of the run, and the configuration that trains the same model."""
    record = run.run_record
    assert record is not None
    options = {"corpus": corpus.name if corpus else "CORPUS"}
    if record.init_from:
        options["init_from"] = record.init_from
    sections = record.options.content
    options |= {name: section for name, section in sections.items() if name != "track"}
    configuration = yaml.safe_dump({"runs": {run.name: options}}, sort_keys=False)
    versions = record.environment.items()
    environment = ", ".join(f"{name} {version}" for name, version in versions)
    return [
        "",
        "## Rerun",
        f"Trained with {environment}, on {record.nodes} nodes of {record.nproc_per_node} processes.",
        "With the data above as a corpus, this configuration trains the same model in any layout:",
        "",
        "```yaml",
        configuration.rstrip("\n"),
        "```",
        "",
    ]


def _format_table(task: str, rows: list[Row]) -> list[str]:
    """Format a table of the means of all rows; no lines if no column has means."""
    columns: dict[str, None] = {}
    for row in rows:
        with_mean = [column for column, score in row.scores.items() if score.mean is not None]
        columns |= dict.fromkeys(with_mean)
    if not columns:
        return []
    headings = [_format_cell(task), *columns]
    lines = ["", f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for row in rows:
        means = [row.scores[column].mean if column in row.scores else None for column in columns]
        values = ["" if mean is None else f"{mean:.3f}" for mean in means]
        lines.append(f"| {' | '.join([_format_cell(row.method.name), *values])} |")
    return lines


def _format_cell(text: Any) -> str:
    """Format text for one cell of a table."""
    return " ".join(str(text).replace("|", "\\|").split())
