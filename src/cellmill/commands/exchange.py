"""Models to and from other places. Modules that need an extra are imported when they are called."""

import importlib
import re
from pathlib import Path
from typing import Any

import yaml

from cellmill.errors import ConfigError, DataError
from cellmill.models.published import import_geneformer, import_scgpt
from cellmill.report.collect import ReportedCorpus, ReportedRun, read_corpus, read_run
from cellmill.runs.results import Row

READERS = {"geneformer": import_geneformer, "scgpt": import_scgpt}


def import_model(*, kind: str, folder: Path, out: Path, **options: Any) -> None:
    """Read the published layout `kind` in `folder` into the model folder `out`. Raises DataError if
    it is another.
    """
    print(READERS[kind](folder, out, **options), flush=True)


def export(*, format: str, model: Path, out: Path) -> None:
    """Write the model in folder `model` to `out`, a .onnx file or a folder for transformers. Raises
    UserError.
    """
    if format == "onnx":
        if out.suffix != ".onnx":
            raise ConfigError(f"{out}: expected a name that ends in .onnx")
        difference = importlib.import_module("cellmill.models.onnx_file").write_onnx(model, out)
        print(f"{model} -> {out}, vectors within {difference:.1g} of the model's", flush=True)
        return
    try:
        module = importlib.import_module("cellmill.models.families.hf")
    except ImportError as error:
        raise ConfigError(
            f"the package {error.name} is not installed; pip install 'cellmill[hf]'"
        ) from None
    module.write_transformers(model, out)
    print(f"{model} -> {out}", flush=True)


def push(*, model: Path, repo: str, licence: str, private: bool) -> None:
    """Upload the model folder; of a run's, also its evaluate/metrics.json. Raises UserError."""
    metrics = model.resolve().parent / "evaluate" / "metrics.json"
    hub = importlib.import_module("cellmill.models.hub")
    url = hub.push(
        model, repo, hub_card(model, licence), metrics if metrics.is_file() else None, private
    )
    print(f"{model} -> {url}", flush=True)


def hub_card(model: Path, licence: str) -> str:
    """The card of the export, with licence; for a run's model also its data, its results next to
    baselines, and options to rerun it. Raises DataError if the folder has no card.
    """
    if not licence.replace("-", "").replace(".", "").isalnum():
        raise ConfigError(
            f"--licence: expected an identifier of the hub, such as apache-2.0 or other, got {licence!r}"
        )
    try:
        card = (model / "README.md").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"{model / 'README.md'}: no such file; export the model again (consolidate)"
        ) from None
    card = re.sub(r"(?m)^license: .*\n", "", card, count=1)  # a card that was pulled has one
    library = "library_name: cellmill\n"
    card = card.replace(library, f"{library}license: {licence}\n", 1)
    folder = model.resolve().parent
    if not (folder / "train" / "run.json").is_file():
        return card
    run = read_run(folder)
    record = run.run_record
    assert record is not None
    corpus = None
    if record.manifest is not None:
        data = Path(record.manifest).parent.parent
        if (data / "cells").is_dir():  # it may be gone
            corpus = read_corpus(data)
    options = {"corpus": corpus.name if corpus else "CORPUS"}
    if record.init_from:
        options["init_from"] = record.init_from
    sections = record.options.content
    options |= {name: section for name, section in sections.items() if name != "track"}
    configuration = yaml.safe_dump({"runs": {run.name: options}}, sort_keys=False)
    versions = record.environment.items()
    environment = ", ".join(f"{name} {version}" for name, version in versions)
    lines = [card.rstrip("\n")]
    if corpus is not None:
        lines += _data(corpus)
    lines += _results(run)
    lines += ["", "## Rerun"]
    lines.append(
        f"Trained with {environment}, on {record.nodes} nodes of {record.nproc_per_node} processes."
    )
    lines.append(
        "With the data above as a corpus, this configuration trains the same model in any layout:"
    )
    lines += ["", "```yaml", configuration.rstrip("\n"), "```", ""]
    return "\n".join(lines)


def _data(corpus: ReportedCorpus) -> list[str]:
    manifest = corpus.manifest
    levels = manifest and manifest.obs_levels.get("dataset")
    lines = [
        "",
        "## Data",
        "| dataset | source | licence | SHA-256 of the input | cells |",
        "|---|---|---|---|---|",
    ]
    rounded: list[str] = []
    for dataset in corpus.datasets:
        name = dataset.dataset
        if levels and name not in levels.levels:
            continue  # no cell of it was trained on
        source = dataset.source
        texts = (name, source.source or "not said", source.licence or "not said")
        shown = " | ".join(map(_cell, texts))
        lines.append(f"| {shown} | `{source.sha256}` | {dataset.cells.after:,} |")
        if source.counts_rule:
            rounded.append(
                f"{_cell(name)}: {source.n_rounded:,} estimated counts had fractions and were "
                f"rounded (`counts_rule: {source.counts_rule}`)."
            )
    if rounded:
        lines += ["", *rounded]
    fingerprint = manifest.fingerprint if manifest else "unknown"
    return [*lines, "", f"Fingerprint of the shards: `{fingerprint}`."]


def _results(run: ReportedRun) -> list[str]:
    """A table of each task, its baselines among the rows, and its verdicts."""
    lines = ["", "## Results"]
    if run.evaluation is None:
        return [*lines, "Not evaluated."]
    for name, dataset in run.evaluation.datasets.items():
        lines += ["", f"{_cell(name)}: {dataset.n_scored:,} cells ({dataset.cells})."]
        for task, result in dataset.tasks.items():
            lines += _table(task, result.rows)
            if result.sentences:
                lines += ["", *result.sentences]
    return lines


def _table(task: str, rows: list[Row]) -> list[str]:
    """Means of all rows; empty without a column of means."""
    columns: dict[str, None] = {}
    for row in rows:
        shown = [column for column, score in row.scores.items() if score.mean is not None]
        columns |= dict.fromkeys(shown)
    if not columns:
        return []
    headings = [_cell(task), *columns]
    lines = ["", f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for row in rows:
        means = [row.scores[column].mean if column in row.scores else None for column in columns]
        values = ["" if mean is None else f"{mean:.3f}" for mean in means]
        lines.append(f"| {' | '.join([_cell(row.method.name), *values])} |")
    return lines


def _cell(text: Any) -> str:
    """Text in one cell of a table."""
    return " ".join(str(text).replace("|", "\\|").split())
