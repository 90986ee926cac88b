"""The command line: one sub-command per rule of the workflow, three that make data, and those for
runs and machines.

A stage is a function of files: its inputs and outputs are arguments, its options are the sections
of config/config.yaml that it reads. The workflow passes them as `--options` (a JSON file); by hand,
`--config` with `--run` or `--corpus` reads them from the configuration. A stage is imported when it
is called, so `--help` needs no torch.
"""

import errno
import importlib
import os
import shlex
import sys
from collections.abc import Iterable
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from cellmill.arguments import CONFIG, new_parser
from cellmill.config import OPTIONS, check_options, load_config
from cellmill.config.datasets import COUNTS, ObsColumns
from cellmill.config.load import Tree, find_atlas
from cellmill.config.machine import PLANNED, Machine
from cellmill.errors import UserError
from cellmill.files import parse_json, read_json, refuse_overwriting, refuse_special
from cellmill.imports import importing

MODULES = {
    "stages.data": "fetch demo simulate preprocess vocabulary divide shard_part shard unpack",
    "stages.plan": "plan",
    "stages.train": "train",
    "stages.export": "pull consolidate",
    "stages.cells": "embed embed_external teach predict generate",
    "stages.atlas": "atlas map_cells",
    "stages.evaluate": "evaluate knock_out predict_changes",
    "stages.report": "report sweep",
    "commands.project": "init check run",
    "commands.status": "status",
    "commands.watch": "watch",
    "commands.run": "attach cancel logs follow",
    "commands.preflight": "preflight",
    "commands.profiles": "profiles_install profiles_new",
    "commands.corpora": "convert plan_corpus",
    "commands.exchange": "import_model export push",
    "commands.options": "options",
    "commands.seen": "seen",
    "commands.impute": "impute",
    "commands.perturb": "perturb",
    "commands.translate": "translate",
}
"""Functions that run sub-commands, by module; a function is called like its sub-command."""
MODULE_OF: dict[str, str] = {}
for _module, _names in MODULES.items():
    MODULE_OF |= dict.fromkeys(_names.split(), _module)


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command.

    Exit codes: 0 done, 2 an error the user can fix, 75 stopped with its state saved, 130
    interrupted, 1 a bug, or a search without a result.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a killed job has written all its lines
    arguments = vars(new_parser(__doc__.split("\n\n")[0]).parse_args(argv))
    stage = arguments.pop("stage")
    message: object
    try:
        _check_paths(arguments)
        flags = _pop(arguments, [name for name in arguments if "." in name])
        if stage in OPTIONS:
            arguments["options"] = _with_flags(_options(stage, arguments), flags)
        if stage == "map":
            find_atlas(arguments["model"], arguments["atlas"])
        if stage == "preprocess":
            columns = _pop(arguments, ObsColumns.model_fields)
            columns = {name: value for name, value in columns.items() if value is not None}
            arguments["columns"] = check_options(ObsColumns, columns, "the dataset's columns")
        if "nproc_per_node" in arguments:
            machine = _pop(arguments, PLANNED if stage == "plan" else Machine.model_fields)
            if stage == "plan":  # takes a range of nodes, as launcher slurm does
                machine["launcher"] = "slurm"
            arguments["machine"] = check_options(
                Machine, machine, "the machine (flags, or set-resources in the profile)"
            )
        name = {
            "profiles": f"profiles_{arguments.pop('what', None)}",
            "import": "import_model",
            "map": "map_cells",
        }.get(stage, stage)
        with importing():
            module = importlib.import_module(f"cellmill.{MODULE_OF[name]}")
        getattr(module, name)(**arguments)
        return 0
    except UserError as error:
        message = error
        if "counts" in arguments and stage != "preprocess":  # which is for a row of the table
            message = str(error).replace(COUNTS, "--counts")
        code = error.exit_code
    except OSError as error:
        if os.environ.get("CELLMILL_TRACEBACK"):
            raise
        message = UserError(f"{error.filename or 'a file'}: {error.strerror or error}")
        code = 2
        if error.filename == "which" and error.errno == errno.ENOENT:
            message = UserError(
                "no program `which` on PATH, which Snakemake's plugin for SLURM calls; install it"
            )
    except KeyboardInterrupt:
        message = "interrupted"
        code = 130
    print(f"cellmill {stage}: {message}", file=sys.stderr)
    return code


def _pop(arguments: Tree, names: Iterable[str]) -> Tree:
    """Take those of `names` that are there out of the arguments."""
    return {name: arguments.pop(name) for name in names if name in arguments}


def _check_paths(arguments: Tree) -> None:
    """Raise UserError for a FIFO, or an output that is another file of the command.

    Opening a FIFO would wait. Raise OSError for a loop of links.
    """
    files: list[tuple[str, Path]] = []
    for name, value in arguments.items():
        paths = value if isinstance(value, list) else [value]
        files += [(f"--{name.replace('_', '-')}", path) for path in paths if isinstance(path, Path)]
    for _, path in files:
        refuse_special(path, "a file or folder")
        try:
            path.stat()
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise
    for flag, path in files:
        if flag in ("--out", "--report"):
            # stages that may append to their input check it themselves
            allowed = {flag, "--input"} if "append" in arguments else {flag}
            refuse_overwriting(path, [file for file in files if file[0] not in allowed], flag)


def _options(stage: str, arguments: Tree) -> Any:
    text = arguments.pop("options")
    config = arguments.pop("config")
    name = arguments.pop("name", None)
    if text is not None:
        written = text.lstrip().startswith(("{", "["))
        tree = parse_json(text, "--options") if written else read_json(Path(text))
        return check_options(OPTIONS[stage], tree, "--options" if written else text)
    if (
        stage in ("embed", "atlas", "map", "knock_out", "predict", "impute", "perturb")
        and name is None
        and config is CONFIG
    ):
        # not given: the model is enough
        defaults: Tree = {section: {} for section in OPTIONS[stage].model_fields}
        return check_options(OPTIONS[stage], defaults, stage)
    workflow = load_config(config)
    owners = workflow.entries(stage)
    if owners and name is None and len(owners) == 1:
        name = next(iter(owners))
    if owners and name not in owners:
        kind = "corpus" if owners is workflow.corpora else "run"
        message = (
            f"no {kind} {name!r} in {config}" if name else f"--{kind} is required for {config}"
        )
        raise UserError(f"{message}; there are: {', '.join(owners)}")
    for key in ("init_from", "trunk", "teacher") if stage == "train" else ():
        parent = getattr(owners[name], key)
        if parent is not None and arguments[key] is None:
            flag = f"--{key.replace('_', '-')}"
            raise UserError(
                f"run {name!r} has {key}: {parent}; pass {flag} FOLDER too, as the workflow does"
            )
    if stage == "plan" and name in workflow.runs:
        corpus = workflow.runs[name].corpus
        arguments["train"] = Path("results/runs", name, "train")
        arguments["shard"] = workflow.corpora[corpus].shard
        if not any(arguments.get(key) for key in ("manifest", "cells", "genes")):
            arguments["manifest"] = _find_shards(corpus, config)
    return check_options(OPTIONS[stage], workflow.section(stage, name), str(config))


def _find_shards(corpus: str, config: Path) -> Path | None:
    """Manifest of a corpus in results; without one None, after saying which command writes it."""
    manifest = Path("results/corpora", corpus, "shards/manifest.json")
    if manifest.exists():
        print(f"shards of {manifest}\n")
        return manifest
    words = "" if config == CONFIG else f" --configfile {shlex.quote(str(config))}"
    print(
        f"corpus {corpus} has no shards yet, so the numbers below are of assumed cells; "
        f"`cellmill run -- {manifest}{words}` makes them"
    )
    return None


def _with_flags(options: Any, flags: Tree) -> Any:
    """The options with those that flags give, by `section.option`."""
    given = {key: value for key, value in flags.items() if value is not None}
    if not given:
        return options
    tree = options.model_dump()
    if given.keys() & {"predict.min_probability", "predict.min_accuracy"}:
        tree["predict"] = {}  # one threshold replaces the other
    for key, value in given.items():
        section, name = key.split(".")
        tree[section][name] = value
    return check_options(type(options), tree, "the command")


if __name__ == "__main__":
    sys.exit(main())
