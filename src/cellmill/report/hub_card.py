"""Model card for the hub: that of the export, with licence, data, results beside baselines, and options to rerun it."""

import re
from pathlib import Path
from typing import Any

import yaml

from cellmill.errors import ConfigError, DataError
from cellmill.report.collect import ReportedCorpus, ReportedRun, read_corpus, read_run


def hub_card(model: Path, licence: str) -> str:
    """README.md of a model folder, with results of the run beside it. Raises DataError if the folder has no card."""
    if not licence.replace("-", "").replace(".", "").isalnum():
        raise ConfigError(f"--licence {licence!r}: expected an identifier of the hub, such as apache-2.0 or other")
    try:
        card = (model / "README.md").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{model / 'README.md'}: no such file; export the model again (consolidate)") from None
    card = re.sub(r"(?m)^license: .*\n", "", card, count=1)  # of a card that was pulled
    card = card.replace("library_name: cellmill\n", f"library_name: cellmill\nlicense: {licence}\n", 1)
    folder = model.resolve().parent
    if not (folder / "train" / "run.json").is_file():
        return card
    run = read_run(folder)
    data = Path((run.record or {})["manifest"]).parent.parent
    corpus = read_corpus(data) if (data / "cells").is_dir() else None  # it may be gone
    parts = [card.rstrip("\n"), *([] if corpus is None else _data(corpus)), *_results(run), *_rerun(run, corpus)]
    return "\n".join(parts) + "\n"


def _data(corpus: ReportedCorpus) -> list[str]:
    manifest = corpus.manifest or {}
    trained = (manifest.get("obs_levels", {}).get("dataset") or {}).get("levels")
    lines = ["", "## Data", "| dataset | source | licence | SHA-256 of the input | cells |", "|---|---|---|---|---|"]
    for dataset in corpus.datasets:
        if trained is not None and dataset["dataset"] not in trained:
            continue
        source = dataset["source"]
        texts = (dataset["dataset"], source["source"] or "not said", source["licence"] or "not said")
        kept = dataset["cells"]["out"]
        lines.append(f"| {' | '.join(map(_cell, texts))} | `{source['sha256']}` | {kept:,} |")
    return [*lines, "", f"Fingerprint of the shards: `{manifest.get('fingerprint', 'unknown')}`."]


def _results(run: ReportedRun) -> list[str]:
    """Tables of each task, the baselines in the same tables, and its verdicts."""
    if run.evaluation is None:
        return ["", "## Results", "Not evaluated."]
    lines = ["", "## Results"]
    for name, dataset in run.evaluation["datasets"].items():
        lines += ["", f"{_cell(name)}: {dataset['n_scored']:,} cells ({dataset['cells']})."]
        for task, entry in dataset["tasks"].items():
            columns = list(dict.fromkeys(key for row in entry["rows"] for key in row if key.endswith("_mean")))
            if columns:
                lines += ["", f"| {_cell(task)} | {' | '.join(column.removesuffix('_mean') for column in columns)} |"]
                lines.append("|---" * (len(columns) + 1) + "|")
                for row in entry["rows"]:
                    values = ("" if (value := row.get(key)) is None else f"{value:.3f}" for key in columns)
                    lines.append(f"| {_cell(row['name'])} | {' | '.join(values)} |")
            lines += ["", *entry["sentences"]] if entry["sentences"] else []
    return lines


def _rerun(run: ReportedRun, corpus: ReportedCorpus | None) -> list[str]:
    record = run.record or {}
    options = {name: section for name, section in record["options"].items() if name != "track"}
    started = {"init_from": record["init_from"]} if record["init_from"] else {}
    shown = {"runs": {run.name: {"corpus": corpus.name if corpus else "CORPUS", **started, **options}}}
    environment = ", ".join(f"{name} {version}" for name, version in record.get("environment", {}).items())
    return [
        *("", "## Rerun", f"Trained with {environment}, on {record['nodes']} nodes of {record['nproc_per_node']} "),
        "processes. With the data above as a corpus, this configuration trains the same model in any layout:",
        *("", "```yaml", yaml.safe_dump(shown, sort_keys=False).rstrip("\n"), "```"),
    ]


def _cell(text: Any) -> str:
    """Text in one cell of a table."""
    return " ".join(str(text).replace("|", "\\|").split())
