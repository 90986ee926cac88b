"""The command line: one sub-command per rule of the workflow, three that make data, and those for runs and machines.

A stage is a function of files: its inputs and outputs are arguments, its options are the sections of config/config.yaml
that it reads. The workflow passes them as `--options` (a JSON file); by hand, `--config` with `--run` or `--corpus`
reads them from the configuration. A stage is imported when it is called, so `--help` needs no torch.
"""

import errno
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from cellmill.arguments import CONFIG, PLANNED, new_parser
from cellmill.config import OPTIONS, check_options, load_config
from cellmill.config.datasets import ObsColumns
from cellmill.config.machine import Machine
from cellmill.errors import UserError
from cellmill.files import read_json, special_kind
from cellmill.imports import importing

MODULES = {
    "stages.data": ("fetch", "demo", "simulate", "preprocess", "vocabulary", "divide", "shard_part", "shard"),
    "stages.plan": ("plan",),
    "stages.train": ("train",),
    "stages.export": ("pull", "consolidate"),
    "stages.cells": ("embed", "embed_external", "teach", "predict", "generate"),
    "stages.evaluate": ("evaluate", "knock_out", "predict_changes"),
    "stages.report": ("report", "sweep"),
    "commands.status": ("status", "watch"),
    "commands.run": ("attach", "cancel", "logs", "follow"),
    "commands.preflight": ("preflight",),
    "commands.profiles": ("profiles_install", "profiles_new"),
    "commands.corpora": ("convert", "archive", "unarchive", "plan_corpus"),
    "commands.exchange": ("import_model", "export_onnx", "export_transformers", "push"),
    "commands.translate": ("translate",),
}
"""Functions that run sub-commands, by module; one is called like its sub-command."""
MODULE_OF = {name: module for module, names in MODULES.items() for name in names}


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command. Exit codes: 0 done, 2 an error the user can fix, 75 stopped with its state saved,
    130 interrupted, 1 a bug."""
    arguments = vars(new_parser(__doc__.split("\n\n")[0]).parse_args(argv))
    stage = arguments.pop("stage")
    try:
        _check_paths(arguments)
        _check_outputs(arguments)
        flags = {name: arguments.pop(name) for name in [*arguments] if "." in name}
        if stage in OPTIONS:
            arguments["options"] = _with_flags(_options(stage, arguments), flags)
        if stage == "preprocess":
            given = {name: value for name in ObsColumns.model_fields if (value := arguments.pop(name)) is not None}
            arguments["columns"] = check_options(ObsColumns, given, "the dataset's columns")
        if "nproc_per_node" in arguments:
            names = PLANNED if stage == "plan" else Machine.model_fields
            given = {name: arguments.pop(name) for name in names if name in arguments}
            if stage == "plan":  # which takes a range of nodes, as launcher slurm does
                given["launcher"] = "slurm"
            arguments["machine"] = check_options(Machine, given, "the machine (profile, set-resources)")
        kind = {"profiles": "what", "export": "format"}.get(stage)
        name = f"{stage}_{arguments.pop(kind)}" if kind else "import_model" if stage == "import" else stage
        with importing():
            module = importlib.import_module(f"cellmill.{MODULE_OF[name]}")
        getattr(module, name)(**arguments)
    except UserError as error:
        print(f"cellmill {stage}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if os.environ.get("CELLMILL_TRACEBACK"):
            raise
        reason = UserError(f"{error.filename or 'a file'}: {error.strerror or error}")
        print(f"cellmill {stage}: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"cellmill {stage}: interrupted", file=sys.stderr)
        return 130
    return 0


def _check_paths(arguments: dict[str, Any]) -> None:
    """Raise UserError for a path that is neither a file nor a folder: opening a FIFO would wait without end."""
    for value in arguments.values():
        for path in value if isinstance(value, list) else [value]:
            if not isinstance(path, Path):
                continue
            if (kind := special_kind(path)) is not None:
                raise UserError(f"{path}: expected a file or folder, got a {kind}")
            try:
                path.stat()
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise UserError(f"{path}: {error.strerror}") from None


def _check_outputs(arguments: dict[str, Any]) -> None:
    """Raise UserError if an output is an input too, or the other output: one of them would be lost."""
    if "append" in arguments:  # stages that may add to their input, and check it
        return
    outputs = {name: path for name in ("report", "out") if isinstance(path := arguments.get(name), Path)}
    given = {name: value if isinstance(value, list) else [value] for name, value in arguments.items()}
    taken = {
        path.resolve(): name
        for name, paths in given.items()
        for path in paths
        if name not in outputs and isinstance(path, Path)
    }
    for name, path in outputs.items():
        if (other := taken.setdefault(path.resolve(), name)) != name:
            raise UserError(f"--{name} {path} is --{other.replace('_', '-')}, which would be lost; name another file")


def _options(stage: str, arguments: dict[str, Any]) -> Any:
    text, config, name = arguments.pop("options"), arguments.pop("config"), arguments.pop("name", None)
    if text is not None:
        return check_options(OPTIONS[stage], *_sections(text))
    if stage in ("embed", "knock_out", "predict") and name is None and config == CONFIG:  # a model needs no config
        return check_options(OPTIONS[stage], {section: {} for section in OPTIONS[stage].model_fields}, stage)
    workflow = load_config(config)
    owners = workflow.entries(stage)
    if owners and name is None and len(owners) == 1:
        name = next(iter(owners))
    if owners and name not in owners:
        kind = "corpus" if owners is workflow.corpora else "run"
        message = f"no {kind} {name!r} in {config}" if name else f"--{kind} is required for {config}"
        raise UserError(f"{message}; there are: {', '.join(owners)}")
    for key in ("init_from", "trunk", "teacher") if stage == "train" else ():
        if (parent := getattr(owners[name], key)) is not None and arguments[key] is None:
            flag = f"--{key.replace('_', '-')}"
            raise UserError(f"run {name!r} has {key}: {parent}; pass {flag} FOLDER too, as the workflow does")
    return check_options(OPTIONS[stage], workflow.section(stage, name), str(config))


def _with_flags(options: Any, flags: dict[str, str | None]) -> Any:
    """The options with those that flags give, by `section.option`."""
    tree, given = options.model_dump(), {key.split(".")[1]: value for key, value in flags.items() if value is not None}
    if given.keys() & {"min_probability", "min_accuracy"}:
        tree["predict"] = {}  # one threshold replaces the other
    for key in flags:
        section, name = key.split(".")
        if name in given:
            tree[section][name] = given[name]
    return check_options(type(options), tree, "the command") if given else options


def _sections(text: str) -> tuple[Any, str]:
    """Sections from JSON or a file of it, and their source for messages."""
    if not text.lstrip().startswith(("{", "[")):
        return read_json(Path(text)), text
    try:
        return json.loads(text), "--options"
    except ValueError as error:
        raise UserError(f"--options: not valid JSON ({error})") from None
    except RecursionError:
        raise UserError("--options: not valid JSON (nested too deeply)") from None


if __name__ == "__main__":
    sys.exit(main())
