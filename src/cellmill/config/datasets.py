"""The table of datasets: rows, URLs of inputs, and filters of cells. Torch-free.

The csv module reads one line at a time: a quote that is not closed on its line, which it would
continue through the rows below, is an error, so that no row can vanish. pandas would take a second
to import.
"""

import ast
import csv
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import parse_qsl, urlsplit

import yaml
from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

from cellmill.config.corpus import NOT_WILDCARD, RESERVED, ROLES, Preprocess
from cellmill.config.section import Section, error_line, explain, shown
from cellmill.errors import ConfigError, did_you_mean
from cellmill.files import special_kind

# characters; names of a corpus and a dataset are in one file name, whose limit is 255
MAX_NAME = 100
NO_LABEL = tuple(
    "na|n a|nan|none|missing|blank|unknown|unk|unidentified|undefined|undetermined|unspecified|"
    "not known|not determined|unassigned|not assigned|unclassified|not classified|unannotated|"
    "not annotated|unlabeled|unlabelled|not labeled|not labelled|not available|not applicable|"
    "not reported|not provided|to be determined|tbd|doublet|doublets|multiplet|multiplets|"
    "low quality|lowquality|debris|empty droplet|empty droplets|"
    "cell|native cell|animal cell|eukaryotic cell".split("|")  # any cell, in the Cell Ontology
)
"""Texts that mean no label, as `plain_label` writes them."""
COUNTS = "the dataset's `counts`"
"""Where a user says which matrix, in messages."""
CountsRule = Literal["refuse", "round", "stochastic"]
COUNTS_RULES: tuple[CountsRule, ...] = get_args(CountsRule)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SECRET = re.compile(
    r"(signature|token|secret|passw|credential|api_?key|access_?key|bearer|hmac|^auth|^(sig|key|pwd|jwt)$)",
    re.I,
)
# a file of several AnnData, and one of them
_PART = re.compile(r"(.+\.(?:h5mu|h5ad|h5|zarr|zip))#([^#]+)")
# text, or a name in backticks
_QUOTED = re.compile(r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|`([^`]+)`|[&|]""")


def check_name(name: Any) -> str:
    """Return the name of a corpus, run or dataset. Raise ValueError if no path or option can have it."""
    if isinstance(name, str) and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError(
            f"{shown(name)} is no name; use letters, digits, '_', '.' and '-', first a letter or digit"
        )
    read = yaml.safe_load(name) if isinstance(name, str) else name
    if not isinstance(read, str):
        raise ValueError(f"the name {name} is {read} in YAML; add a letter to it")
    if len(name) > MAX_NAME:
        raise ValueError(
            f"expected a name of at most {MAX_NAME} characters, got {len(name)}: {name[:20]}..."
        )
    return str(name)


def plain_label(text: str) -> str:
    """A label in lower case, its words joined by single spaces; empty without a letter or a digit.

    A last word such as cells is left out if it has another before it: `Unknown cells` is `unknown`.
    """
    words = re.findall(r"\w+", text.replace("_", " ").casefold())
    kinds = ("cell", "cells", "type", "celltype")
    while len(words) > 1 and words[-1] in kinds and " ".join(words) not in NO_LABEL:
        words.pop()
    return " ".join(words)


class ObsColumns(Section):
    """Columns of the table about obs; each obs column must exist before anything is computed."""

    filter: str | None = None
    """Filter for cells to keep, in the syntax of `pandas.DataFrame.query`. It compares obs columns
    (`` `in backticks` `` if the name has spaces) with strings, numbers and lists, joined by and,
    or, not. A column of text compares with numbers, or True and False, if all its texts are such.
    """
    label: str | None = None
    """obs column of the label, which the evaluation predicts, or several, separated by |. It is
    kept whatever preprocess.keep_obs says.
    """
    label_name: str | None = None
    """Name of the label in preprocessed cells, so that datasets with differently named columns
    share one. If there are several labels, give one name for each, separated by |. Empty keeps the
    name of the column.
    """
    label_map: str | None = Field(None, pattern=NOT_WILDCARD)
    """Tab-separated file with the columns `from` and `to`, which renames values of the label in
    preprocessed cells and everything made from them. If there are several labels, give one file for
    each, or nothing, separated by |. Cells whose `to` is empty get no label; labels that are not
    listed stay, and are reported. A `from` that no cell has is refused. `filter` is applied first.
    """
    no_label: str | None = None
    """Texts that mean that a cell has no label, separated by |. They replace the list in
    docs/data.md (`unknown`, `nan`, `Unassigned`, `doublet`, ...). With -, no text means that, and
    each of these is a class.
    """
    batch: str | None = None
    """obs column of the batch; preprocessed cells have it as `batch`."""
    donor: str | None = None
    """obs column of the donor; preprocessed cells have it as `donor`."""
    condition: str | None = None
    """obs column of the condition, such as a disease; preprocessed cells have it as `condition`."""
    perturbation: str | None = None
    """obs column of the perturbation; preprocessed cells have it as `perturbation`."""
    control: str | None = None
    """Value of untreated cells in the perturbation column (without one, in the condition column),
    or several values, separated by |. Preprocessed cells with one of them have `is_control` true,
    and all get the first value.
    """
    guide: str | None = None
    """obs column of the guide of each cell. preprocess reports controls without a guide, and
    controls with a guide that perturbed cells have too. If empty, a column is used whose name and
    values look like guides.
    """
    dose: str | None = None
    """obs column of a dose, a number; preprocessed cells have it as `dose`."""

    def problems(self) -> Iterator[str]:
        labels = self.labels
        names = self.label_names
        if self.filter is not None:
            filter_columns(self.filter)
        for key in ("label_name", "label_map"):
            given = (getattr(self, key) or "").split("|")
            if getattr(self, key) is not None and len(given) != len(labels):
                yield f"{key}: expected one for each label, {len(labels)}, got {len(given)}; separate them by |"
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            yield f"label_name: two labels are called {twice[0]!r}; rename one"
        for label, name in zip(labels, names):
            if name != label and (not name or name in RESERVED):
                yield f"label_name: expected a name of its own for label {label!r}, got {name!r}; choose another"
        if self.control is not None and self.controlled is None:
            yield "control is a value of the perturbation or the condition; name one of these columns too"
        if self.guide is not None and self.control is None:
            yield "guide is read to check the controls; set control, the value of untreated cells, too"

    @property
    def labels(self) -> list[str]:
        return [name for name in map(str.strip, (self.label or "").split("|")) if name]

    @property
    def label_names(self) -> list[str]:
        """Names of the labels in preprocessed cells, in the order of `labels`."""
        if self.label_name is None:
            return self.labels
        return [name.strip() for name in self.label_name.split("|")]

    @property
    def label_maps(self) -> dict[str, str]:
        """Path of the label map, of labels that have one, by name of the label in preprocessed cells."""
        paths = map(str.strip, (self.label_map or "").split("|"))
        return {name: path for name, path in zip(self.label_names, paths) if path}

    def means_no_label(self, label: str) -> bool:
        """True for a text that stands for a missing label.

        Upper and lower case, `_` and punctuation are the same.
        """
        if self.no_label is None:
            plain = plain_label(label)
            return not plain or plain in NO_LABEL
        if self.no_label.strip() == "-":
            return False
        listed = [text.strip().casefold() for text in self.no_label.split("|")]
        return label.strip().casefold() in listed

    @property
    def roles(self) -> dict[str, str]:
        return {role: getattr(self, role) for role in ROLES if getattr(self, role) is not None}

    @property
    def controlled(self) -> str | None:
        """The role whose value `control` is."""
        return next((role for role in ("perturbation", "condition") if role in self.roles), None)

    def controls_in(self, known: Collection[str]) -> list[str]:
        """The values of `control`. A text with | that is itself one of `known` is one value."""
        if self.control is None:
            return []
        if self.control in known:
            return [self.control]
        values = re.split(r"(?<!\|)\|(?!\|)", self.control)
        return [value.strip() for value in values if value.strip()]

    @property
    def read_columns(self) -> dict[str, str]:
        """obs columns of the file that the row names, with the columns of the table that name each."""
        owners: dict[str, list[str]] = {}
        for name in self.labels:
            owners.setdefault(name, []).append("label")
        for role, column in self.roles.items():
            owners.setdefault(column, []).append(role)
        if self.guide is not None:
            owners.setdefault(self.guide, []).append("guide")
        if self.filter is not None:
            for name in filter_columns(self.filter):
                owners.setdefault(name, []).append("filter")
        return {name: ", ".join(columns) for name, columns in owners.items()}


NO_COLUMNS = ObsColumns.model_validate({})  # a dataset without filter, labels and roles


def is_url(text: str) -> bool:
    """True if an input is a URL, such as `s3://bucket/cells.h5ad`."""
    return _URL.match(text) is not None


def input_path(text: str) -> Path | str:
    """A URL as it is, anything else as a path, which would lose a slash of `s3://`."""
    return text if is_url(text) else Path(text)


def redacted(url: str) -> str:
    """The URL without user, password, query and fragment, for messages."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def check_url(text: str | None) -> str | None:
    """Return an input.

    Raise ConfigError for a URL with credentials, which logs would show, or chained protocols.
    """
    if text is None or not is_url(text):
        return text
    parts = urlsplit(text)
    secrets = []
    for name, _ in parse_qsl(parts.query, True):
        if _SECRET.search(name):
            secrets.append(f"parameter {name}")
    user = parts.netloc.rpartition("@")[0]
    # abfss://CONTAINER@ACCOUNT…
    if user and (":" in user or parts.scheme not in ("abfs", "abfss")):
        secrets.append("a user before @")
    if secrets:
        raise ConfigError(
            f"{redacted(text)}: has credentials ({secrets[0]}), which logs would show; give them by the environment"
        )
    if "::" in text:
        raise ConfigError(
            f"{redacted(text)}: chains protocols with '::'; expected one, as in s3://bucket/cells.h5ad"
        )
    return text


class Dataset(ObsColumns):
    """Each row is a dataset; an empty field is null."""

    dataset: str
    """Name, used in file names."""
    path: Annotated[
        str, StringConstraints(strip_whitespace=True, min_length=1, pattern=NOT_WILDCARD)
    ]
    """Input file or folder, in a format of docs/inputs.md. It is a URL, or a path that is absolute or
    relative to Snakemake's working directory, without braces and < >. `cells.h5mu#rna` is one
    modality of a file.
    """
    counts: str = "X"
    """Matrix with raw counts: X, raw, the name of a layer (`layers/X` for a layer called X), or a
    genome of a 10x file. `expm1(raw)` recovers counts from logarithms and the obs column with each
    cell's total counts.
    """
    counts_rule: CountsRule = "refuse"
    """What to do with estimated counts, which have fractions (RSEM, SoupX, CellBender, the EM of
    STARsolo and alevin). refuse: stop with an error. round: take the nearest whole number.
    stochastic: draw one of the two nearest reproducibly, which keeps the expectation of each value
    and the sum of each cell. Logarithms, normalised and imputed values are always refused.
    """
    gene_column: str | None = None
    """Column of var that names the genes, or `index`. If empty, the column that names the most
    genes.
    """
    organism: Literal["human", "mouse", "none"] | None = None
    """Replaces preprocess.organism for this dataset; none uses var_names as ids."""
    min_genes: int | None = Field(None, ge=0)
    """Replaces preprocess.min_genes for this dataset."""
    min_counts: int | None = Field(None, ge=1)
    """Replaces preprocess.min_counts for this dataset."""
    max_mito_frac: float | None = Field(None, ge=0, le=1)
    """Replaces preprocess.max_mito_frac for this dataset."""
    source: str | None = None
    """Source of the data, for the report."""
    licence: str | None = None
    """Licence of the data, for the report."""

    @model_validator(mode="before")
    @classmethod
    def _part_is_of_counts(cls, row: Any) -> Any:
        """`cells.h5mu#rna` is a file and a part of it: the rules need the path of the file."""
        path = row.get("path") if isinstance(row, dict) else None
        if not isinstance(path, str) or is_url(path.strip()):
            return row
        match = _PART.fullmatch(path.strip())
        if match is None:
            return row
        return row | {"path": match[1], "counts": f"{match[2]}#{row.get('counts') or 'X'}"}

    _name_is_usable = field_validator("dataset")(check_name)
    _has_no_credentials = field_validator("path", "source")(check_url)

    def preprocess(self, section: Preprocess) -> Preprocess:
        """The corpus's options, overridden by the dataset's."""
        changes = {}
        for name in ("organism", "min_genes", "min_counts", "max_mito_frac"):
            value = getattr(self, name)
            if value is not None:
                changes[name] = None if value == "none" else value
        return section.model_copy(update=changes)


def read_datasets(table: Path) -> dict[str, Dataset]:
    """Rows of a tab-separated table by name, in order. Raise ConfigError naming the line."""
    datasets: dict[str, Dataset] = {}
    for line, row in read_rows(table, list(Dataset.model_fields)):
        try:
            dataset = Dataset.model_validate(row)
        except ValidationError as error:
            raise ConfigError(
                f"{table}, line {line}: {error_line(*explain(error, Dataset))}"
            ) from None
        if dataset.dataset in datasets:
            raise ConfigError(
                f"{table}, line {line}: dataset {dataset.dataset!r} is a duplicate; rename it"
            )
        datasets[dataset.dataset] = dataset
    if not datasets:
        missing = "" if table.read_text(encoding="utf-8-sig").strip() else "a header line and "
        raise ConfigError(f"{table}: no datasets; add {missing}a row per .h5ad file")
    return datasets


def read_rows(
    table: Path,
    known: Sequence[str],
    what: str = "the table of datasets",
    required: Sequence[str] = (),
) -> list[tuple[int, dict[str, str]]]:
    """Line number and filled cells of each row; `known` are all columns it may have.

    Raise ConfigError.
    """
    kind = special_kind(table)
    if kind is not None:  # opening a FIFO would wait without end
        raise ConfigError(f"{table}: expected {what}, got a {kind}")
    try:
        lines = table.read_text(encoding="utf-8-sig").split("\n")  # Excel writes a byte-order mark
    except OSError as error:
        text = f"{table}: {error.strerror}; expected {what}"
        if not table.is_absolute():
            text += f"; paths start at the working folder, {Path.cwd()}"
        raise ConfigError(text) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{table}: not UTF-8 text; save it as tab-separated UTF-8") from None
    header, *rows = [
        _cells(f"{table}, line {number}", line) for number, line in enumerate(lines, start=1)
    ]
    while header and not header[-1].strip():  # spreadsheets save empty columns behind the others
        header.pop()
    for name in header:
        if name not in known:
            hint = "separate columns by tabs" if {*" ,;"} & {*name} else did_you_mean(name, known)
            raise ConfigError(f"{table}: unknown column {name[:80]!r}; {hint}")
        if header.count(name) > 1:
            raise ConfigError(f"{table}: two columns are called {name!r}; remove one")
    lacking = [name for name in required if name not in header]
    if lacking:
        raise ConfigError(
            f"{table}: expected the columns {', '.join(required)}, got no {lacking[0]!r}; add it"
        )
    filled = []
    for number, cells in enumerate(rows, start=2):
        if any(cells[len(header) :]):
            raise ConfigError(f"{table}, line {number}: more fields than columns in the header")
        row = {name: cell for name, cell in zip(header, cells) if cell}
        if row:
            filled.append((number, row))
    return filled


def _cells(where: str, line: str) -> list[str]:
    try:
        if "\0" in line:
            raise csv.Error("a NUL character")
        return next(csv.reader([line.removesuffix("\r")], delimiter="\t", strict=True), [])
    except csv.Error as error:
        raise ConfigError(
            f"{where}: {error}; save UTF-8 text with tabs, short cells and quotes that end"
        ) from None


def filter_columns(condition: str) -> list[str]:
    """obs columns that a filter names, in order. Raise ValueError for text that is no expression."""
    tree, quoted = _parse_filter(condition)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    names.sort(key=lambda node: (node.lineno, node.col_offset))
    return list(dict.fromkeys(quoted.get(node.id, node.id) for node in names))


def filter_comparisons(condition: str) -> Iterator[tuple[list[str], list[Any]]]:
    """Columns and values of each comparison, also as `leiden.isin([3])`, unless it calls other methods."""
    tree, quoted = _parse_filter(condition)
    for node in ast.walk(tree):
        parts = [*ast.walk(node)]
        kinds = [*map(type, parts)]
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(), attr="isin" | "eq" | "ne")):
                is_read = kinds.count(ast.Attribute) == 1
            case _:
                is_read = kinds[0] is ast.Compare and kinds.count(ast.Compare) == 1
                is_read = is_read and ast.Attribute not in kinds
        if is_read:
            names = [part.id for part in parts if isinstance(part, ast.Name)]
            values = [part.value for part in parts if isinstance(part, ast.Constant)]
            yield [quoted.get(name, name) for name in names], values


def _parse_filter(condition: str) -> tuple[ast.Expression, dict[str, str]]:
    """Return the tree of a filter, and the columns in backticks by their names in the tree."""
    quoted: dict[str, str] = {}

    def replace_quoted(match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        if not match[2]:  # pandas takes these for words, which bind less than comparisons
            return " and " if match[0] == "&" else " or "
        name = f"__column_{len(quoted)}"
        quoted[name] = match[2]
        return name

    try:
        tree = ast.parse(_QUOTED.sub(replace_quoted, condition).strip(), mode="eval")
    except SyntaxError as error:
        example = """is_primary_data and assay == "10x 3' v3\""""
        raise ValueError(
            f"filter: cannot be read ({error.msg}); expected a condition such as {example}"
        ) from None
    return tree, quoted
