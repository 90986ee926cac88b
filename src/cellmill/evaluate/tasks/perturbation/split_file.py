"""Splits of perturbations in a file, in the forms that people hold.

- `.toml`: the form of cell-load and State: `[training]`, `[zeroshot]` and `[fewshot."DATASET.CONTEXT"]`
- `.json`: lists of perturbations by split, such as `set2conditions` and subgroups of GEARS
- `.tsv`, `.csv`: a header with `perturbation`, `split` and, if contexts differ, `context`

An empty field stands for all. Precedence: perturbation and context, perturbation alone, context
alone, neither.

A name of the file is a perturbation of the dataset if it is equal, or if both have the same parts in
any order and with any delimiter, without words for a control: `B_A` and `A+B+ctrl` are `A+B`.
Nothing else is matched.
"""

import csv
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError

from cellmill.config.corpus import IS_CONTROL
from cellmill.config.parts.tasks import ContextRole, PerturbationConfig
from cellmill.data.arrays import text_values
from cellmill.data.prepare.perturbations import CONTROL_WORD, DELIMITERS, split_at
from cellmill.errors import DataError, did_you_mean, require_known
from cellmill.evaluate.task import Context, Skipped
from cellmill.evaluate.tasks.perturbation.profiles import controlled_role
from cellmill.files import read_json, require_file

TRAIN = "train"
TEST = "test"
SPLITS = (TRAIN, "val", TEST)
NEW = "new perturbation"
FEW_SHOT = "few-shot"
ZERO_SHOT = "zero-shot"
# groups of tested perturbations that GEARS names, and their names in tables
GEARS_GROUPS = {"unseen_single": NEW} | {
    f"combo_seen{seen}": f"{seen} of 2 seen" for seen in range(3)
}
Parts = tuple[str, ...]


class Line(NamedTuple):
    """A statement of the file."""

    location: str  # in the file
    perturbation: str
    context: str
    split: str


class _CellLoad(BaseModel):
    """Form of a TOML file of cell-load: splits by dataset, and by DATASET.CONTEXT."""

    training: dict[str, str] = {}
    zeroshot: dict[str, str] = {}
    fewshot: dict[str, dict[str, list[str]]] = {}


def find_names(context: Context, are_controls: bool) -> set[str]:
    """Names of the controls, or of the perturbations, of a dataset."""
    is_control = context.roles[IS_CONTROL].fillna(False).to_numpy(bool)
    column = context.roles[controlled_role(context.roles)]
    return {*text_values(column[is_control == are_controls].dropna()).tolist()}


class PartNames:
    """Names of perturbations as sorted parts without controls."""

    def __init__(self, context: Context, delimiter: str) -> None:
        self.controls = sorted(find_names(context, are_controls=True))
        self.delimiter = delimiter

    def divide(self, name: str, delimiter: str | None = None) -> Parts:
        """Parts of a combination, or the name alone; empty for a control."""
        parts = split_at(name, delimiter or self.delimiter, self.controls)
        return tuple(sorted(part for part in parts if part and not self.is_control(part)))

    def parts_or_whole(self, name: str) -> Parts:
        """Parts of a name; a whole name that could be a control's word, such as gene CTRL, stays."""
        return self.divide(name) or (name,)

    def is_control(self, part: str) -> bool:
        return part in self.controls or CONTROL_WORD.fullmatch(part) is not None

    def readings(self, name: str) -> set[Parts]:
        """Parts of a name of the file at each delimiter."""
        return {self.divide(name, delimiter) for delimiter in (self.delimiter, *DELIMITERS)}

    def possible_combinations(self, names: Iterable[str]) -> list[str]:
        """Names that are not divided, and whose parts at another delimiter are all other names."""
        known = {*names}
        return [
            name
            for name in sorted(known)
            if len(self.divide(name)) == 1
            and any(len(parts) > 1 and known.issuperset(parts) for parts in self.readings(name))
        ]


@dataclass(frozen=True)
class SplitFile:
    """Splits of the perturbations of one dataset."""

    path: Path
    context_role: str | None  # role whose values are the contexts; None if the file has none
    names: PartNames
    splits: Mapping[tuple[str, str], str]  # by perturbation and context, as `Line` has them
    # novelty of tested perturbations that the file states, in the words of `divide_by_novelty`
    novelty_in_file: Mapping[str, str]
    possible_combinations: list[str]  # see `PartNames`

    @classmethod
    def read(cls, config: PerturbationConfig, context: Context) -> Self:
        """The file of `config`. Raises Skipped for a dataset that a TOML file lacks, and DataError
        for a damaged file or one that does not fit the dataset.
        """
        path = Path(str(config.split_file))
        lines = _read_lines(path, context.dataset)
        role = config.split_context if any(line.context for line in lines) else None
        contexts = set() if role is None else _find_contexts(path, lines, role, context)
        known = find_names(context, are_controls=False)
        names = PartNames(context, config.combination_delimiter)
        resolve = _make_resolver(path, names, known)
        splits: dict[tuple[str, str], str] = {}
        novelty_in_file: dict[str, str] = {}
        for line in lines:
            where = f"{path}, {line.location}"
            if line.split not in SPLITS and line.split not in GEARS_GROUPS:
                expected = ", ".join((*SPLITS, *GEARS_GROUPS))
                raise DataError(f"{where}: expected a split ({expected}), got {line.split!r}")
            if line.context:
                fault = f"{where}: no cell of {context.dataset} has {role} {line.context!r} (split_context)"
                require_known(line.context, contexts, fault)
            perturbation = resolve(where, line.perturbation)
            if perturbation is None:
                continue
            key = (perturbation, line.context)
            # cell-load may test perturbations that it also validates on
            splits[key] = _join_splits(where, line, splits.get(key), path.suffix.lower() == ".toml")
            if line.split in GEARS_GROUPS:
                novelty_in_file[perturbation] = GEARS_GROUPS[line.split]
        return cls(path, role, names, splits, novelty_in_file, names.possible_combinations(known))

    def assign(self, perturbation: np.ndarray, unit_contexts: np.ndarray) -> np.ndarray:
        """(U,) text: split of each unit, empty without one. Raises DataError for a context without
        one, and if no unit is fitted or tested on.
        """
        assigned = []
        for name, context_name in zip(perturbation.tolist(), unit_contexts.tolist()):
            keys = ((name, context_name), (name, ""), ("", context_name), ("", ""))
            assigned.append(next((self.splits[key] for key in keys if key in self.splits), ""))
        splits = np.array(assigned, "U5")
        for context_name in np.unique(unit_contexts).tolist():
            if not splits[unit_contexts == context_name].any() and context_name:
                raise DataError(
                    f"{self.path}: expected a split for {self.context_role} {context_name!r}, got none; add a line for "
                    f"it, such as all its perturbations in {TRAIN}"
                )
        for split in (TRAIN, TEST):
            if split not in assigned:
                raise DataError(
                    f"{self.path}: split {split} is empty: none of its perturbations has enough cells (min_cells) and "
                    f"controls; the dataset has: {', '.join(np.unique(perturbation)[:8])}"
                )
        return splits

    def divide_by_novelty(
        self,
        units: np.ndarray,
        train: np.ndarray,
        perturbation: np.ndarray,
        unit_contexts: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """`units` by their novelty in words, relative to the fitted units; each novelty is scored
        separately.

        A part of a combination is seen if it is the whole perturbation of a fitted unit.
        """
        fitted = {*perturbation[train].tolist()}
        by_novelty: dict[str, list[int]] = {}
        for unit in units.tolist():
            parts = self.names.divide(perturbation[unit])
            if unit_contexts[unit] not in unit_contexts[train]:
                novelty = ZERO_SHOT
            elif perturbation[unit] in fitted:
                novelty = FEW_SHOT
            elif len(parts) > 1:
                novelty = f"{sum(part in fitted for part in parts)} of {len(parts)} seen"
            else:
                novelty = NEW
            by_novelty.setdefault(novelty, []).append(unit)
        return {novelty: np.array(by_novelty[novelty]) for novelty in sorted(by_novelty)}


def _find_contexts(path: Path, lines: list[Line], role: str, context: Context) -> set[str]:
    """Values of the dataset's role of contexts. Raises DataError for a dataset without this role."""
    if role not in context.roles:
        roles = [other for other in get_args(ContextRole) if other in context.roles]
        raise DataError(
            f"{path}: it has contexts, such as {next(filter(None, (line.context for line in lines)))!r}, but "
            f"{context.dataset} has no column {role}; name one in the table of datasets, or set split_context of task "
            f"perturbation to a role that it has ({', '.join(roles) or 'none'})"
        )
    return {*text_values(context.roles[role].dropna()).tolist()}


def _join_splits(where: str, line: Line, before: str | None, may_overlap: bool) -> str:
    """Split of a line, if its perturbation and context are in split `before` by an earlier line.

    Raises DataError for another split, unless `may_overlap` and both test or validate: then test.
    """
    split = TEST if line.split in GEARS_GROUPS else line.split
    if before in (None, split):
        return split
    if not may_overlap or TRAIN in (before, split):
        raise DataError(
            f"{where}: {line.perturbation or line.context!r} is in {split}, and in {before} above; "
            "leave it in one"
        )
    return TEST


def _make_resolver(
    path: Path, names: PartNames, known: set[str]
) -> Callable[[str, str], str | None]:
    """Function of a location and a name in the file: the perturbation of the dataset, None for a
    control, and empty for an empty name. It raises DataError for an unknown or ambiguous name.
    """
    by_parts: dict[Parts, list[str]] = {}
    for name in sorted(known):
        by_parts.setdefault(names.divide(name), []).append(name)

    def resolve(where: str, name: str) -> str | None:
        if not name or name in known:
            return name
        if names.is_control(name):
            return None
        readings = names.readings(name)
        matches = sorted({match for parts in readings for match in by_parts.get(parts, [])})
        if len(matches) > 1:
            raise DataError(
                f"{where}: {name!r} may be {' or '.join(matches)}; write one of these names"
            )
        if not matches and () in readings:
            return None
        if not matches:
            raise DataError(
                f"{where}: no cell has the perturbation {name!r}; {did_you_mean(name, known)}"
            )
        return matches[0]

    return resolve


def _read_lines(path: Path, dataset: str) -> list[Line]:
    suffix = path.suffix.lower()
    require_file(path)
    try:
        if suffix == ".toml":
            return [*_read_cell_load(path, dataset)]
        if suffix == ".json":
            return [*_read_lists(path)]
        if suffix in (".tsv", ".csv"):
            return [*_read_table(path, "\t" if suffix == ".tsv" else ",")]
    except ValidationError as error:
        problem = error.errors()[0]
        location = ".".join(map(str, problem["loc"]))
        raise DataError(
            f"{path}: {location}: {problem['msg']}, got {problem['input']!r}; a name with a dot needs quotes, as in "
            '[fewshot."DATASET.CONTEXT"]'
        ) from None
    except (csv.Error, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not a valid {suffix} file ({error})") from None
    raise DataError(
        f"{path}: expected .toml, .json, .tsv or .csv, got {suffix!r}; a pickle is not read, because it can run code: "
        "write the lists in it with json.dump"
    )


def _read_cell_load(path: Path, dataset: str) -> Iterator[Line]:
    content = _CellLoad.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    keys = [*content.training, *content.zeroshot, *content.fewshot]
    datasets = dict.fromkeys(key.partition(".")[0] for key in keys)
    if dataset not in datasets:
        raise Skipped(f"{path}: no dataset {dataset!r}; there are: {', '.join(datasets) or 'none'}")
    if dataset in content.training:
        yield Line("[training]", "", "", content.training[dataset])
    for key, split in content.zeroshot.items():
        name, _, context = key.partition(".")
        if name == dataset:
            yield Line("[zeroshot]", "", context, split)
    for key, names_by_split in content.fewshot.items():
        name, _, context = key.partition(".")
        if name != dataset:
            continue
        location = f"[fewshot.{key!r}]"
        yield Line(location, "", context, TRAIN)  # the other perturbations
        for split, names in names_by_split.items():
            for perturbation in names:
                yield Line(location, perturbation, context, split)


def _read_lists(path: Path) -> Iterator[Line]:
    form: TypeAdapter[dict[str, list[str]]] = TypeAdapter(dict[str, list[str]])
    for split, names in form.validate_python(read_json(path)).items():
        for name in names:
            yield Line(f"list {split!r}", name, "", split)


def _read_table(path: Path, delimiter: str) -> Iterator[Line]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter, strict=True)
        header = rows.fieldnames or []
        for column in ("perturbation", "split"):
            require_known(column, header, f"{path}: no column {column!r}")
        for row in rows:
            cells: dict[str, Any] = {"context": "", **row}
            location = f"line {rows.line_num}"
            if None in cells.values() or None in row:
                raise DataError(
                    f"{path}, {location}: expected {len(header)} values as in the header"
                )
            texts = [str(cells[name]).strip() for name in ("perturbation", "context", "split")]
            if not texts[0] and not texts[1]:
                raise DataError(
                    f"{path}, {location}: expected a perturbation or a context, got neither"
                )
            yield Line(location, *texts)
