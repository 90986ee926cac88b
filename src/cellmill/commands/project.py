"""Projects: init writes one for files of counts, check opens its files, run runs its workflow."""

import glob
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import chdir, suppress
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import pandas as pd
from jinja2 import StrictUndefined, Template

from cellmill.config.datasets import MAX_NAME, Dataset, check_name, input_path, is_url
from cellmill.config.load import check_options, load_config
from cellmill.config.options import TrainOptions
from cellmill.config.shipped import find_shipped
from cellmill.config.workflow import Workflow
from cellmill.data.prepare.check import check_datasets, check_inputs
from cellmill.data.prepare.qc_lines import list_first
from cellmill.data.prepare.survey import COLUMNS, Survey, survey_file
from cellmill.data.shards.manifest import Manifest
from cellmill.data.stream.order import OrderRule
from cellmill.errors import ConfigError, UserError
from cellmill.files import called, fsync, write_text
from cellmill.preflight.configuration import check_genes
from cellmill.runs.identity import foresee_refusal

TEMPLATE = Path(__file__).with_name("project.yaml")
SNAKEFILE = """\
# The workflow of the installed cellmill; config/config.yaml says what it computes, profiles/ where.
from cellmill.config.shipped import find_shipped


include: find_shipped("workflow/Snakefile")


rule default:
    default_target: True
    input:
        rules.all.input,
    message:
        "every file is made"
"""
LOCAL = "profiles/local"
SNAKEFILES = ("Snakefile", "snakefile", "workflow/Snakefile", "workflow/snakefile")  # as snakemake
# folders that snakemake writes to, even in a dry run
WRITTEN = (".", ".snakemake", ".snakemake/locks", ".snakemake/iocache")
REPORT = Path("results/report/index.html")
DEMO_DATA = "data/demo/pbmc68k.h5ad"  # output of rule demo_data
_ENDS = re.compile(r"(\.(h5ad|h5mu|h5|hdf5|loom|zarr|mtx|csv|tsv|txt|zip|gz))+$", re.IGNORECASE)

Row = dict[str, str | None]
"""A row of the table of datasets."""


def init(*, folder: Path, data: list[str], skip_unreadable: bool) -> None:
    """Write a project for the files `data` (paths, patterns or URLs) to `folder`.

    Raise UserError, and write nothing, if the folder is not empty or a file cannot be used.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists and is not an empty folder; choose another FOLDER")
    inputs = list_inputs(data)
    faults: list[Exception] = []
    rows: list[Row] = []
    surveys: list[Survey] = []
    for name, path in zip(name_datasets(inputs), inputs):
        try:
            if glob.has_magic(path) and not is_url(path) and not os.path.exists(path):
                raise ConfigError(f"{path}: no file matches this pattern")
            survey = survey_file(input_path(path))
            rows.append(make_row(name, path, survey))
            surveys.append(survey)
            print(f"{name}: {survey.describe()}")
        except (UserError, OSError) as error:
            faults.append(error)
    for fault in faults:
        print(f"cellmill init: {fault}", file=sys.stderr)
    if not surveys or (faults and not skip_unreadable):
        n_all = len(faults) + len(surveys)
        remedy = "; --skip-unreadable leaves them out" if surveys else ""
        raise UserError(f"{len(faults)} of {n_all} inputs cannot be used, nothing written{remedy}")
    write_project(folder, rows, surveys)
    for line in explain_columns(rows):
        print(line)
    where = shlex.quote(str(folder))
    print(f"{folder}: Snakefile, config/config.yaml, config/datasets.tsv, profiles/local")
    print(
        f"options: {find_shipped('config/README.md')}; examples: {find_shipped('config/examples')}"
    )
    print(f"cd {where} && cellmill check && cellmill run")


def list_inputs(data: Iterable[str]) -> list[str]:
    """List the absolute paths and URLs that `data` names, each once."""
    inputs: dict[str, str] = {}  # by resolved path
    for text in data:
        paths = [text]
        if not Path(text).exists():
            paths = sorted(glob.glob(text, recursive=True)) or paths
        for path in paths:
            absolute = path if is_url(path) else os.path.abspath(path)
            resolved = os.path.realpath(absolute)
            if resolved in inputs:
                print(f"{path}: given twice, used once")
            inputs.setdefault(resolved, absolute)
    return list(inputs.values())


def name_datasets(inputs: list[str]) -> list[str]:
    """Name each input after its file, with the folder in front if several files share a name."""
    paths = [PurePosixPath(urlsplit(text).path if is_url(text) else text) for text in inputs]
    stems = [_ENDS.sub("", path.name.replace("#", "-")) for path in paths]
    shared = {stem for stem, n in Counter(stems).items() if n > 1}
    names: list[str] = []
    for path, stem in zip(paths, stems):
        wanted = make_name(f"{path.parent.name}-{stem}" if stem in shared else stem)
        name = wanted
        number = 2
        while name in names:
            name = f"{wanted[: MAX_NAME - 5]}-{number}"
            number += 1
        names.append(name)
    return names


def make_name(text: str) -> str:
    """Make a name that a corpus, run or dataset may have from `text`."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-._")[: MAX_NAME - 5]
    try:
        return check_name(name)
    except ValueError:  # empty, or a number, date or truth value in YAML
        return f"data-{name}".rstrip("-")


def make_row(name: str, path: str, survey: Survey) -> Row:
    """Make the row of an input in the table. Raise ConfigError if a value is invalid."""
    thresholds = survey.thresholds
    row: Row = {
        "dataset": name,
        "path": path,
        "counts": survey.counts,
        "counts_rule": survey.counts_rule,
        "organism": survey.coverage.organism,
        **dict.fromkeys(COLUMNS),
        **survey.columns,
        "min_genes": str(thresholds.min_genes),
        "max_mito_frac": f"{thresholds.max_mito_frac:g}",
    }
    perturbations = survey.perturbations
    if perturbations is not None:
        row["perturbation"] = perturbations.column
        row["control"] = "|".join(perturbations.controls)
    check_options(Dataset, row, path)
    return row


def explain_columns(rows: list[Row]) -> Iterator[str]:
    """Explain which obs columns were chosen, and how to change them."""
    for field in COLUMNS:
        datasets: dict[str, list[str]] = {}  # by column
        for row in rows:
            if row[field] is not None:
                datasets.setdefault(str(row[field]), []).append(str(row["dataset"]))
        if not datasets:
            continue
        columns = [*datasets]
        choice = f"{columns[0]}, chosen by its name; to change it"
        if len(columns) > 1:
            each = [f"{column} of {list_first(names)}" for column, names in datasets.items()]
            choice = f"{', '.join(each)}, chosen by their names; to change them"
        text = f"{field}: {choice}, edit column {field} of config/datasets.tsv"
        if field == "label" and len(columns) > 1:
            text += f"; all become column {columns[0]} (label_name)"
        if field == "batch":
            text += (
                "; if you compare its values, set objective.batch_column of config/config.yaml to null, because a "
                "model removes differences between batches"
            )
        yield text
    for row in rows:
        if row.get("perturbation") is not None:
            yield (
                f"perturbation: {row['perturbation']} of {row['dataset']}, whose values are genes and the control "
                f"{row['control']}; to change it, edit columns perturbation and control of config/datasets.tsv"
            )


def write_project(folder: Path, rows: list[Row], surveys: list[Survey]) -> None:
    """Write all files of a project to a folder next to `folder`, check them, and rename it."""
    name = make_name(folder.resolve().name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with called(folder):
        beside = tempfile.TemporaryDirectory(prefix=".cellmill-init-", dir=folder.parent)
    with beside as temporary:
        made = Path(temporary, "project")
        write_text(made / "config/datasets.tsv", format_table(rows))
        write_text(made / "config/config.yaml", format_config(name, rows, surveys))
        write_text(made / "Snakefile", SNAKEFILE)
        shutil.copytree(find_shipped("profiles/local"), made / "profiles/local")
        with chdir(made):
            pipeline = load_config(Path("config/config.yaml"))
            check_datasets(pipeline)
            check_inputs(pipeline)
        made.rename(folder)  # replaces an empty folder
    fsync(folder.parent)


def format_table(rows: list[Row]) -> str:
    """Format the table of datasets, without the values of the first file, which config.yaml has."""
    table = pd.DataFrame(rows)
    table["counts_rule"] = table["counts_rule"].where(table["counts_rule"] != "refuse")
    for column in ("organism", "min_genes", "max_mito_frac"):
        table[column] = table[column].where(table[column] != rows[0][column])
    labels = table["label"].dropna()
    if labels.nunique() > 1:  # datasets share one name, by which they are compared
        table.loc[labels.index, "label_name"] = labels.iloc[0]
    is_shown = table.notna().any() | (table.columns == "label")
    return table.loc[:, is_shown].to_csv(sep="\t", index=False)


def format_config(name: str, rows: list[Row], surveys: list[Survey]) -> str:
    """Format config.yaml, with the reason of each value that depends on the files."""
    n_genes = [survey.coverage.n_with_id for survey in surveys]
    text = TEMPLATE.read_text(encoding="utf-8")
    template = Template(
        text, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return template.render(
        name=name,
        datasets=list(zip(rows, surveys)),
        fields={field for survey in surveys for field in survey.columns},
        has_controls=any(survey.perturbations is not None for survey in surveys),
        max_genes=max(n_genes),
        least_genes=min(n_genes),
    )


def check(*, config: Path) -> None:
    """Open every file, and print what cannot be used and what will be skipped.

    Raise UserError if a file or a column that the configuration names cannot be used, or if a
    trained run has changed options that stage `train` refuses.
    """
    pipeline = load_config(config)
    n_unusable = 0
    for checked in check_genes(pipeline):
        n_unusable += checked.verdict == "no"
        print(checked)
    check_datasets(pipeline)
    for line in check_inputs(pipeline, is_made):
        print(f"?   {line}")
    refused = list(list_refused(pipeline, str(config)))
    for line in refused:
        print(f"no  {line}")
    if n_unusable:
        raise UserError(f"{n_unusable} of the datasets cannot be used, for the reasons above")
    if refused:
        raise UserError(f"{len(refused)} of the runs will be refused, for the reasons above")
    print(f"{config}: every file and column is there, or the workflow makes it")


def list_refused(pipeline: Workflow, source: str) -> Iterator[str]:
    """Yield a line for each trained run whose changed options stage `train` will refuse."""
    for name, run in pipeline.runs.items():
        options = check_options(TrainOptions, pipeline.section("train", name), source)
        manifest = Path("results/corpora", run.corpus, "shards/manifest.json")
        steps = None
        if manifest.exists():
            cells = options.stream.train_cells(Manifest.read(manifest).splits["train"].n_obs)
            order_rule = OrderRule.for_counting(options, cells)
            steps = options.train.total_steps(order_rule.steps_per_epoch)
        refusal = foresee_refusal(Path("results/runs", name, "train"), options, steps)
        if refusal is not None:
            yield f"run {name} will be refused: {refusal}"


def is_made(path: str) -> bool:
    """Return whether a rule of the workflow writes the file."""
    return path == DEMO_DATA or Path(path).parts[:1] == ("results",)


def check_words(words: list[str]) -> None:
    """Raise ConfigError for values of --config and --configfile that snakemake would not explain."""
    flag = ""
    for word in words:
        if word.startswith("-"):
            flag = word
        elif flag in ("--config", "-C") and not re.match(r"[A-Za-z_]\w*=", word):
            dotted = re.fullmatch(r"(\w+)\.(\w+)=(.*)", word)
            example = "'{}={{{}: {}}}'".format(*dotted.groups()) if dotted else "KEY=VALUE"
            raise ConfigError(f"--config {word}: expected {example}; targets go before --config")
        elif flag in ("--configfile", "--configfiles") and not Path(word).is_file():
            raise ConfigError(f"{flag} {word}: no such file; targets go before {flag}")


def quiet_words(profile: Path) -> list[str]:
    """List options that hide the reason of each job, unless the profile's `quiet` was changed."""
    file = profile / "config.yaml"
    is_shipped = file.is_file() and "\nquiet: [host] " in file.read_text(encoding="utf-8")
    return ["--quiet", "host", "reason"] if is_shipped else []


def run(*, profile: str, words: list[str]) -> None:
    """Run snakemake with a profile, then print the path of the report.

    Raise UserError if snakemake fails. Ctrl-C is left to snakemake.
    """
    check_words(words)
    is_named = any(word.startswith(("-s", "--snakefile")) for word in words)
    has_workflow = is_named or any(map(os.path.exists, SNAKEFILES))
    if not has_workflow or (profile == LOCAL and not os.path.exists(LOCAL)):
        raise ConfigError(
            f"no project here (no Snakefile or {LOCAL}): cd into one, or `cellmill init`"
        )
    moves = any(word.startswith(("-d", "--directory")) for word in words)
    for folder in () if moves else WRITTEN:
        if os.path.exists(folder) and not os.access(folder, os.W_OK, effective_ids=True):
            raise UserError(
                f"{os.path.abspath(folder)}: Permission denied; the workflow writes to its working directory"
            )
    is_dry = any(word.startswith(("-n", "--dry")) for word in words)
    quiet = [] if is_dry else quiet_words(Path(profile))
    command = [sys.executable, "-m", "snakemake", *quiet, "--profile", profile, *words]
    earlier = REPORT.stat().st_mtime_ns if REPORT.exists() else None
    process = subprocess.Popen(command)
    while process.poll() is None:
        with suppress(KeyboardInterrupt):
            process.wait()
    if process.returncode:
        command = ["snakemake", "--profile", profile, *words]
        raise UserError(
            f"snakemake ended with exit code {process.returncode}: {shlex.join(command)}"
        )
    if REPORT.exists():
        note = " (of an earlier run)" if REPORT.stat().st_mtime_ns == earlier else ""
        print(f"{REPORT.absolute()}{note}")
