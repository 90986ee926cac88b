"""Sweeps: runs as the product of values of some options, with names made from the values."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from math import prod
from typing import Any

from pydantic import Field

from cellmill.config.section import Section
from cellmill.config.table import check_name
from cellmill.errors import ConfigError

MOST_RUNS = 10_000
_COLUMNS = {  # of results.csv, beside the axes
    "run", "parameters", "cells", "steps", "cells_seen", "gpu_hours", "cpu_core_hours",
    "dataset", "task", "name", "kind", "metric", "value", "sd",
}  # fmt: skip
Point = tuple[str, dict[str, Any]]  # as it stands in the run's name, and value by option


class Sweep(Section):
    """Runs that differ in the options of `over`, one for each combination of their values.

    The run of a combination is called after the sweep and the values, such as `size-seed0-hidden128`.
    """

    run: dict[str, Any] = Field(description="Shared by all its runs: `corpus`, and any key of a run.")
    over: dict[str, list[Any] | dict[str, dict[str, Any]]] = Field(
        min_length=1,
        description="Values by option, such as `train.seed: [0, 1]`; or, under a name of your own, named points that "
        "set several options at once, such as `layout: {ddp: {parallel.strategy: ddp}, pp: {parallel.pp: 2}}`.",
    )


def expand(sweeps: Any, taken: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, dict[str, Any]]]]:
    """Runs of all sweeps, as written in a configuration, and for each sweep and run its values by axis.

    `taken` are the runs that the configuration has beside them. Raises ConfigError naming the sweep and the option.
    """
    runs: dict[str, Any] = {}
    values: dict[str, dict[str, dict[str, Any]]] = {}
    for name, sweep in _mapping(sweeps, "sweep").items():
        where = f"sweep.{name}"
        sweep = _mapping(sweep, where)
        if wrong := [key for key in (name, *_mapping(sweep.get("over") or {}, where)) if not isinstance(key, str)]:
            raise ConfigError(f"{where}: YAML reads a name as {wrong[0]}; add a letter to it")
        if missing := [key for key in ("run", "over") if not sweep.get(key)]:
            raise ConfigError(f"{where}.{missing[0]}: is missing")
        axes = {str(axis): list(_points(axis, given, where)) for axis, given in _mapping(sweep["over"], where).items()}
        if taken_names := sorted(axes.keys() & _COLUMNS):
            raise ConfigError(f"{where}.over.{taken_names[0]}: is a column of results.csv; give the axis another name")
        if (n := prod(map(len, axes.values()))) > MOST_RUNS:
            raise ConfigError(f"{where}: {n:,} runs; leave out values, or make sweeps of at most {MOST_RUNS:,}")
        for combination in product(*axes.values()):
            run = "-".join([name, *(label for label, _ in combination)])
            try:
                check_name(run)
            except ValueError as error:
                raise ConfigError(f"{where}: {error}; name its values, as {{NAME: {{OPTION: VALUE}}}}") from None
            if run in runs or run in taken:
                raise ConfigError(f"{where}: two runs are called {run}; give one of its values another name")
            changes = [change for _, options in combination for change in options.items()]
            runs[run] = _changed(_mapping(sweep["run"], f"{where}.run"), changes, where)
            shown = {axis: _shown(axis, label, options) for axis, (label, options) in zip(axes, combination)}
            values.setdefault(name, {})[run] = shown
    return runs, values


def _points(axis: str, given: Any, where: str) -> Iterator[Point]:
    """Points of one axis."""
    where = f"{where}.over.{axis}"
    if isinstance(given, dict) and given:
        for label, options in given.items():
            yield str(label), _mapping(options, f"{where}.{label}")
    elif isinstance(given, list) and given:
        if repeated := [value for place, value in enumerate(given) if value in given[:place]]:
            raise ConfigError(f"{where}: {repeated[0]} is there twice; leave one out")
        for value in given:
            if isinstance(value, dict | list):
                raise ConfigError(f"{where}: {value} has no name; write it as {{NAME: {{OPTION: VALUE}}}}")
            yield f"{axis.rsplit('.', 1)[-1]}{_text(value)}", {axis: value}
    else:
        raise ConfigError(f"{where}: expected a list of values, or a mapping of names to options, got {given!r}")


def _text(value: Any) -> str:
    return {True: "yes", False: "no", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)


def _shown(axis: str, label: str, options: dict[str, Any]) -> Any:
    """Value of an axis in tables and figures: that of its option, or the point's name."""
    if list(options) != [axis] or isinstance(value := options[axis], dict | list):
        return label
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)  # YAML reads 3e-4 as text
    return value


def _changed(run: dict[str, Any], changes: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    """A copy of `run` with options, as `section.key`, set."""
    run = dict(run)
    for option, value in changes:
        *sections, key = str(option).split(".")
        at = run
        for section in sections:
            at[section] = dict(_mapping(at.get(section) or {}, f"{where}.run.{section}"))
            at = at[section]
        at[key] = value
    return run


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a mapping, got {value!r}")
    return value
