"""The file that every bridge writes. The standard library alone."""

import json
import math
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any


def write_rows(
    out: Path,
    package: str,
    about: Mapping[str, Any],
    kinds: Mapping[str, str],
    values: Mapping[str, Mapping[str, float]],
    counts: Mapping[str, Mapping[str, int | None]] | None = None,
) -> None:
    """Write `values` by name and metric as tidy rows, complete or not at all, and print them.

    `kinds` are those of the names: model, baseline, ceiling or probe. `about` has `dataset`, and what else is said of
    it. A value that is not finite is null. `counts`, by name and metric, are numbers of units that a value is the mean
    of.
    """
    rows = [
        {"name": name, "kind": kinds[name], "metric": metric}
        | {"value": float(value) if math.isfinite(value) else None}
        | ({} if counts is None else {"n": counts[name][metric]})
        for name, of_metrics in values.items()
        for metric, value in of_metrics.items()
    ]
    tree = {"package": package, "version": version(package), **about, "rows": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(tree, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        beside.replace(out)
    finally:
        beside.unlink(missing_ok=True)
    for row in rows:
        shown = "none" if row["value"] is None else f"{row['value']:.4f}"
        print(f"{about['dataset']}: {row['name']}: {row['metric']} {shown}")
