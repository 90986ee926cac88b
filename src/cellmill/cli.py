"""The command line: one sub-command for each rule of the workflow, and the two that make data.

Every sub-command is a function of files: what it reads and writes are arguments, its options are the sections of
config/config.yaml that the stage reads. The workflow passes those as `--options` (JSON); by hand `--config` with
`--run` or `--corpus` reads them from the file. A stage is imported when it is called, so `--help` needs no torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from cellmill import __version__
from cellmill.config import OPTIONS, check_options, load_config
from cellmill.config.machine import Machine
from cellmill.errors import UserError

COMMANDS = ("profiles", "preflight", "status", "attach", "cancel", "logs")
"""Sub-commands that look after runs and machines; the others are stages."""
_HOW_MANY = ("nodes", "nproc_per_node")  # of the machine's options, those that plan reads too


def main(argv: list[str] | None = None) -> int:
    """Runs one sub-command. Exit codes: 0 done, 2 something the user can mend, 75 stopped with its state saved,
    130 interrupted, 1 a bug."""
    arguments = vars(_parser().parse_args(argv))
    stage = arguments.pop("stage")
    try:
        if stage in OPTIONS:
            arguments["options"] = _options(stage, arguments)
        if "nodes" in arguments:
            given = {name: arguments.pop(name) for name in Machine.model_fields if name in arguments}
            if stage == "plan":  # of any number of nodes a range may have
                given["launcher"] = "slurm"
            arguments["machine"] = check_options(Machine, given, "the machine (profile, set-resources)")
        room = "commands" if stage in COMMANDS else "stages"
        importlib.import_module(f"cellmill.{room}.{stage}").run(**arguments)
    except UserError as error:
        print(f"cellmill {stage}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if os.environ.get("CELLMILL_TRACEBACK"):
            raise
        print(f"cellmill {stage}: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"cellmill {stage}: interrupted", file=sys.stderr)
        return 130
    return 0


def _options(stage: str, arguments: dict[str, Any]) -> Any:
    text, config, name = arguments.pop("options"), arguments.pop("config"), arguments.pop("name", None)
    if text is not None:
        try:
            sections = json.loads(text)
        except ValueError as error:
            raise UserError(f"--options: not valid JSON ({error})") from None
        return check_options(OPTIONS[stage], sections, "--options")
    if stage == "embed" and name is None:  # an exported model stands alone: no configuration has to be there
        return check_options(OPTIONS[stage], {"embed": {}}, "embed")
    pipeline = load_config(config)
    known = {"report": {}, "preprocess": pipeline.corpora, "vocabulary": pipeline.corpora, "shard": pipeline.corpora}
    owners = known.get(stage, pipeline.runs)
    if owners and name is None and len(owners) == 1:
        name = next(iter(owners))
    if owners and name not in owners:
        kind = "corpus" if owners is pipeline.corpora else "run"
        asked = f"no {kind} is called {name!r}" if name else f"--{kind} is wanted"
        raise UserError(f"{asked}: {config} has {', '.join(owners)}")
    return check_options(OPTIONS[stage], pipeline.section(stage, name), str(config))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cellmill", description=__doc__.split("\n\n")[0])
    parser.add_argument("--version", action="version", version=f"cellmill {__version__}")
    stages = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")

    demo = stages.add_parser("demo", help="write the demo data: 700 real PBMC")
    demo.add_argument("--out", type=Path, required=True, help="the .h5ad to write")

    simulate = stages.add_parser("simulate", help="write simulated cells")
    simulate.add_argument("--out", type=Path, required=True, help="the .h5ad to write")
    simulate.add_argument("--cells", type=int, default=2000, help="cells (default: %(default)s)")
    simulate.add_argument(
        "--genes",
        type=int,
        default=2000,
        help="genes, the first protein-coding of the human table (default: %(default)s)",
    )
    simulate.add_argument("--types", type=int, default=8, help="cell types, leaves of a tree (default: %(default)s)")
    simulate.add_argument("--batches", type=int, default=2, help="technical batches (default: %(default)s)")
    simulate.add_argument("--perturbations", type=int, default=0, help="perturbed genes, beside the control")
    simulate.add_argument("--seed", type=int, default=0, help="of everything drawn (default: %(default)s)")

    preprocess = _stage(stages, "preprocess", "count, filter and name the cells of one dataset", "corpus")
    preprocess.add_argument("--input", type=Path, required=True, help="the .h5ad with raw counts")
    preprocess.add_argument("--counts", default="X", help="where they lie: X, raw or the name of a layer")
    preprocess.add_argument("--dataset", required=True, help="name of the dataset")
    preprocess.add_argument("--source", default="", help="where the data come from, for the report")
    preprocess.add_argument("--licence", default="", help="under what licence, for the report")
    preprocess.add_argument("--out", type=Path, required=True, help="the .h5ad to write")
    preprocess.add_argument("--report", type=Path, required=True, help="the QC report (.json) to write")

    vocabulary = _stage(stages, "vocabulary", "the genes of a corpus, their medians, special tokens", "corpus")
    vocabulary.add_argument("--cells", type=Path, nargs="+", required=True, help="preprocessed .h5ad files")
    vocabulary.add_argument("--out", type=Path, required=True, help="vocabulary.tsv")

    shard = _stage(stages, "shard", "train, val and test shards in rank order", "corpus")
    shard.add_argument("--cells", type=Path, nargs="+", required=True, help="preprocessed .h5ad files")
    shard.add_argument("--vocabulary", type=Path, required=True)
    shard.add_argument("--out", type=Path, required=True, help="manifest.json; shards go beside it")

    plan = _stage(stages, "plan", "memory, time and steps of a run, before anything is queued", "run")
    plan.add_argument("--manifest", type=Path, help="of the shards; without it a corpus is assumed")
    plan.add_argument("--out", type=Path, help="plan.json; without it nothing is written")
    _machine(plan)
    plan.add_argument("--device", default="cpu", help="what each process computes on, such as h100 (default: cpu)")
    plan.add_argument("--suggest", action="store_true", help="print the best layouts instead")
    assumed = {"cells": 1_000_000, "genes": 20_000}
    for name, number in assumed.items():
        text = "assumed without a manifest (default: %(default)s)"
        plan.add_argument(f"--{name}", type=_count, default=number, help=text)

    train = _stage(stages, "train", "train a run, or go on with it", "run")
    train.add_argument("--manifest", type=Path, required=True, help="of the shards")
    train.add_argument("--vocabulary", type=Path, required=True)
    train.add_argument("--out", type=Path, required=True, help="folder for checkpoints, metrics.jsonl, status.json")
    train.add_argument("--init-from", type=Path, help="exported model that gives the first weights")
    _machine(train)
    _cluster(train)

    consolidate = _stage(stages, "consolidate", "a checkpoint as a model that stands alone", "run")
    consolidate.add_argument("--train", type=Path, required=True, help="folder of the training run")
    consolidate.add_argument("--vocabulary", type=Path, required=True)
    consolidate.add_argument("--out", type=Path, required=True, help="folder of the exported model")

    embed = _stage(stages, "embed", "cells of a dataset through an exported model", "run")
    embed.add_argument("--model", type=Path, required=True, help="folder of an exported model")
    embed.add_argument("--input", type=Path, required=True, help=".h5ad, preprocessed or raw counts")
    embed.add_argument("--counts", default="X", help="where the counts lie: X, raw or the name of a layer")
    embed.add_argument("--out", type=Path, required=True, help="the .h5ad to write, with obsm['X_cellmill']")

    evaluate = _stage(stages, "evaluate", "judge embeddings on held-out cells beside baselines", "run")
    evaluate.add_argument("--model", type=Path, required=True, help="folder of the exported model")
    evaluate.add_argument("--manifest", type=Path, required=True, help="of the shards it was trained on")
    evaluate.add_argument(
        "--ancestors", type=Path, nargs="*", default=[], help="manifests of the runs its first weights came from"
    )
    evaluate.add_argument("--cells", type=Path, nargs="+", required=True, help="preprocessed .h5ad files")
    evaluate.add_argument("--embeddings", type=Path, nargs="+", required=True, help="one for each, in the same order")
    evaluate.add_argument("--labels", nargs="+", required=True, help="obs column for each; '-' for none")
    evaluate.add_argument("--out", type=Path, required=True, help="metrics.json")

    report = _stage(stages, "report", "one page over all runs", None)
    report.add_argument("--runs", type=Path, nargs="+", required=True, help="folders of runs")
    report.add_argument("--corpora", type=Path, nargs="+", required=True, help="folders of corpora")
    report.add_argument("--out", type=Path, required=True, help="index.html")

    profiles = stages.add_parser("profiles", help="link the profiles where Snakemake looks")
    profiles.add_argument("what", choices=["install"])
    profiles.add_argument(
        "--from", dest="source", type=Path, default=Path("profiles"), help="folder of profiles (default: %(default)s)"
    )

    preflight = stages.add_parser(
        "preflight",
        help="go, or why not, before a big run is queued",
        description="Checks a profile's machine against the configuration, asks SLURM, and tries the nodes.",
    )
    preflight.add_argument("--profile", required=True, help="its name, or the path of its folder or file")
    preflight.add_argument("--config", type=Path, default=Path("config/config.yaml"), help="(default: %(default)s)")
    preflight.add_argument("--no-job", action="store_true", help="do not try the nodes")
    preflight.add_argument(
        "--wait-min", type=float, default=30, help="minutes the job may wait in the queue (default: %(default)s)"
    )
    preflight.add_argument(
        "--out",
        type=Path,
        default=Path("results/preflight"),
        help="folder, shared with the nodes, for NAME.json and the job (default: %(default)s)",
    )
    _looking_after(stages)
    return parser


def _stage(stages: Any, name: str, text: str, owner: str | None) -> argparse.ArgumentParser:
    parser = stages.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--config", type=Path, default=Path("config/config.yaml"), help="(default: %(default)s)")
    if owner is not None:
        parser.add_argument(f"--{owner}", dest="name", help="its name in the configuration; needed if there are many")
    parser.add_argument("--options", help="the stage's sections as JSON, in place of --config")
    return parser


def _looking_after(stages: Any) -> None:
    """The commands for runs that are queued, running or over."""
    texts = {
        "status": "where each run stands",
        "attach": "follow the log of a run's job until it ends",
        "cancel": "end a run, its state saved",
        "logs": "what a run printed",
    }
    for name, text in texts.items():
        parser = stages.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == "status":
            parser.add_argument("runs", nargs="*", metavar="RUN", help="names of runs (default: all)")
        else:
            parser.add_argument("run", metavar="RUN", help="its name")
        parser.add_argument("--results", type=Path, default=Path("results"), help="folder (default: %(default)s)")
        if name == "logs":
            parser.add_argument("--follow", action="store_true", help="go on as long as it runs")


def _machine(parser: argparse.ArgumentParser) -> None:
    for name in _HOW_MANY:
        field = Machine.model_fields[name]
        parser.add_argument(_flag(name), default=field.default, help=f"{field.description} (default: %(default)s)")


def _cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where it runs", "the profile's `set-resources: train:`, one flag for each key")
    for name, field in Machine.model_fields.items():
        if name not in _HOW_MANY:
            text = f"{field.description} (default: {field.default or 'none'})".replace("%", "%%")
            group.add_argument(_flag(name), default=field.default, help=text)


def _count(text: str) -> int:
    number = int(float(text))
    if not 1 <= number <= 10**12:
        raise ValueError
    return number


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


if __name__ == "__main__":
    sys.exit(main())
