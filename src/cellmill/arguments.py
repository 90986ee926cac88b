"""Arguments of every sub-command of `cellmill`, in one file: a table that is read as a whole."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cellmill import __version__
from cellmill.config import plugin
from cellmill.config.corpus import INPUTS
from cellmill.config.datasets import ObsColumns, input_path
from cellmill.config.machine import Machine
from cellmill.config.options import OPTIONS
from cellmill.config.section import description
from cellmill.config.workflow import sections_of

CONFIG = Path("config/config.yaml")
_INPUT = f"{', '.join((*INPUTS, *plugin.names('input')))}, or a URL"
PLANNED = ("nodes", "nproc_per_node", "mem_mb")  # options of the machine that plan reads too


def new_parser(description: str) -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="cellmill", description=description)
    top.add_argument("--version", action="version", version=f"cellmill {__version__}")
    stages = top.add_subparsers(dest="stage", required=True, metavar="STAGE")
    made = (_add_data, _add_corpus, _add_training, _add_model)
    exchanged = (_add_import, _add_convert, _add_archive, _add_sharing)
    for add in (*made, *exchanged, _add_machine_commands, _add_run_commands):
        add(stages)
    return top


def _add_data(stages: Any) -> None:
    demo = stages.add_parser("demo", help="write the demo data: 700 real PBMC")
    demo.add_argument("--out", type=Path, required=True, help="the .h5ad to write")

    simulate = stages.add_parser("simulate", help="write simulated cells, or proteins")
    simulate.add_argument("--out", type=Path, required=True, help="the .h5ad to write, or a .fasta for proteins")
    _add(simulate, "--cells", 2000, "cells, or proteins")
    _add(simulate, "--genes", 2000, "genes, the first protein-coding of the human table")
    _add(simulate, "--types", 8, "cell types, the leaves of a tree, or protein families")
    _add(simulate, "--batches", 2, "technical batches")
    _add(simulate, "--perturbations", 0, "perturbed genes, in addition to the control")
    _add(simulate, "--seed", 0, "random seed")


def _add_corpus(stages: Any) -> None:
    fetch = _command(stages, "fetch", "copy the input of a dataset from a URL into the cache")
    fetch.add_argument("--input", required=True, help="URL of a file or folder: s3://, gs://, az://, https://, …")
    fetch.add_argument("--cache", type=Path, help="folder (default: CELLMILL_CACHE, else ~/.cache/cellmill)")
    fetch.add_argument("--out", type=Path, required=True, help="the .fetched.json to write: path, SHA-256 and size")

    preprocess = _stage(stages, "preprocess", "read, filter and annotate the counts of one dataset", "corpus")
    preprocess.add_argument("--input", type=input_path, required=True, help=_INPUT)
    _add(preprocess, "--counts", "X", "matrix of the counts: X, raw, the name of a layer, or a genome of a 10x file")
    preprocess.add_argument("--dataset", required=True, help="name of the dataset")
    for name in ObsColumns.model_fields:
        preprocess.add_argument(f"--{name.replace('_', '-')}", help=description(ObsColumns, name).replace("%", "%%"))
    preprocess.add_argument("--round-counts", action="store_true", help="round fractional counts")
    preprocess.add_argument("--source", default="", help="origin of the data, for the report")
    preprocess.add_argument("--licence", default="", help="licence of the data, for the report")
    preprocess.add_argument("--out", type=Path, required=True, help="the .h5ad to write")
    preprocess.add_argument("--report", type=Path, required=True, help="the QC report (.json) to write")

    vocabulary = _stage(stages, "vocabulary", "collect the genes of a corpus and their medians", "corpus")
    vocabulary.add_argument("--cells", type=Path, nargs="+", required=True, help="preprocessed .h5ad files")
    vocabulary.add_argument("--out", type=Path, required=True, help="vocabulary.tsv")

    divide = _stage(stages, "divide", "plan shards that several jobs write", "corpus")
    part = _stage(stages, "shard_part", "write a part of the shards", "corpus")
    part.add_argument("--part", required=True, help="which of how many, such as 3-of-8")
    shard = _stage(stages, "shard", "write train, val and test shards", "corpus")
    for stage, out in (
        (divide, "plan.json, in a folder beside the manifest"),
        (part, "file that tells that the part is done, in the folder of the plan"),
        (shard, "manifest.json; shards go beside it"),
    ):
        stage.add_argument("--cells", type=Path, nargs="+", required=True, help="preprocessed .h5ad files")
        stage.add_argument("--vocabulary", type=Path, required=True)
        stage.add_argument("--out", type=Path, required=True, help=out)


def _add_training(stages: Any) -> None:
    plan = _stage(stages, "plan", "estimate memory and time of a run before it is submitted", "run")
    plan.add_argument("--manifest", type=Path, help="manifest.json of the shards; without it a corpus is assumed")
    plan.add_argument("--out", type=Path, help="plan.json to write (default: none)")
    add_machine(plan, PLANNED)
    _add(plan, "--device", "cpu", "device of each process, such as h100")
    plan.add_argument("--suggest", action="store_true", help="print the best layouts instead of the plan")
    _add(plan, "--cells", 1_000_000, "number of cells assumed without a manifest", type=_count)
    _add(plan, "--genes", 20_000, "number of genes assumed without a manifest", type=_count)

    train = _stage(stages, "train", "train a run, or resume it", "run")
    train.add_argument("--manifest", type=Path, required=True, help="manifest.json of the shards")
    train.add_argument("--vocabulary", type=Path, required=True)
    train.add_argument("--out", type=Path, required=True, help="folder for checkpoints, metrics.jsonl, status.json")
    train.add_argument("--init-from", type=Path, help="folder of an exported model with the initial weights")
    train.add_argument("--trunk", type=Path, help="folder of a checkpoint of another run, from which this one goes on")
    train.add_argument("--teacher", type=Path, help="folder that stage teach wrote, for objective distill")
    restart = "set a training of other options or data in the folder aside and start afresh"
    train.add_argument("--restart", action="store_true", help=restart)
    add_machine(train, PLANNED)
    group = train.add_argument_group("machine", "`set-resources: train:` of the profile, one flag per key")
    add_machine(group, [name for name in Machine.model_fields if name not in PLANNED])

    consolidate = _stage(stages, "consolidate", "export a checkpoint as a self-contained model", "run")
    consolidate.add_argument("--train", type=Path, required=True, help="folder of the training run")
    consolidate.add_argument("--vocabulary", type=Path, required=True)
    consolidate.add_argument("--out", type=Path, required=True, help="folder of the exported model")


def _add_model(stages: Any) -> None:
    embed = _stage(stages, "embed", "embed the cells of a dataset with an exported model", "run")
    embed.add_argument("--model", type=Path, required=True, help="folder of an exported model")
    embed.add_argument("--input", type=input_path, required=True, help=f"preprocessed or raw: {_INPUT}")
    _add(embed, "--counts", "X", "matrix of the counts: X, raw, the name of a layer, or a genome of a 10x file")
    embed.add_argument("--out", type=Path, required=True, help="the .h5ad to write, with obsm['X_cellmill']")
    help_append = "write all of the .h5ad --input too, which --out may be, instead of obs alone"
    embed.add_argument("--append", action="store_true", help=help_append)
    _add_given(embed, "embed", "min_coverage_frac", "min_expressed_frac")

    external = _command(stages, "embed_external", "embed the cells of a dataset by a command of another environment")
    external.add_argument("--name", required=True, help="name in evaluate.external")
    external.add_argument("--command", required=True, help="program and arguments, with {cells} and {out} among them")
    external.add_argument("--input", type=Path, required=True, help="preprocessed .h5ad")
    external.add_argument("--out", type=Path, required=True, help="the .h5ad to write, for evaluate --external")

    teach = _command(stages, "teach", "collect a teacher's vectors of the cells of shards, for objective distill")
    teach.add_argument("--manifest", type=Path, required=True, help="manifest.json of the shards")
    embedded = "DATASET.h5ad of each dataset, by stage embed or with vectors in obsm['X_emb'] or X"
    teach.add_argument("--embeddings", type=Path, nargs="+", required=True, help=embedded)
    teach.add_argument("--out", type=Path, required=True, help="folder of vectors.json and vectors.npy")

    predict = _stage(stages, "predict", "label the cells of a dataset with an exported classifier", "run")
    _add_model_and_cells(predict)
    predict.add_argument("--out", type=Path, required=True, help="the .h5ad to write, with obs['cellmill_label']")
    predict.add_argument("--append", action="store_true", help=help_append)
    _add_given(predict, "embed", "min_coverage_frac", "min_expressed_frac")
    _add_given(predict, "predict", "min_probability", "min_accuracy")

    knock_out = _stage(stages, "knock_out", "remove genes one by one and measure how far embeddings move", "run")
    _add_model_and_cells(knock_out)
    knock_out.add_argument("--out", type=Path, required=True, help="the .h5ad to write: cells by genes")

    evaluate = _stage(stages, "evaluate", "evaluate embeddings on held-out cells next to baselines", "run")
    evaluate.add_argument("--model", type=Path, required=True, help="folder of the exported model")
    evaluate.add_argument("--manifest", type=Path, required=True, help="manifest.json of the shards it was trained on")
    ancestors = "manifests of the runs its initial weights came from"
    evaluate.add_argument("--ancestors", type=Path, nargs="*", default=[], help=ancestors)
    evaluate.add_argument("--baselines", type=Path, help="folder that keeps predictions of baselines for other runs")
    evaluate.add_argument("--cells", type=input_path, nargs="+", required=True, help=f"preprocessed: {_INPUT}")
    beside = "of embed_external or zoo: one per model of evaluate.external for the first file of --cells, then the next"
    evaluate.add_argument("--external", type=Path, nargs="*", default=[], help=beside)
    embeddings = "one per file of --cells, in the same order"
    evaluate.add_argument("--embeddings", type=Path, nargs="+", required=True, help=embeddings)
    labels = "obs columns per file, separated by |; '-' for none"
    evaluate.add_argument("--labels", nargs="+", required=True, help=labels)
    evaluate.add_argument("--out", type=Path, required=True, help="metrics.json")

    changes = _stage(stages, "predict_changes", "predict expression under held-out perturbations, for bridges", "run")
    changes.add_argument("--model", type=Path, required=True, help="folder of the exported model")
    changes.add_argument("--manifest", type=Path, required=True, help="manifest.json of the shards it was trained on")
    changes.add_argument("--ancestors", type=Path, nargs="*", default=[], help=ancestors)
    changes.add_argument("--cells", type=input_path, required=True, help=f"preprocessed: {_INPUT}")
    changes.add_argument("--embedding", type=Path, required=True, help="of the cells, by stage embed")
    changes.add_argument("--out", type=Path, required=True, help="the .h5ad to write")

    generate = _command(stages, "generate", "draw cells from an exported model of family autoregressive")
    generate.add_argument("--model", type=Path, required=True, help="folder of an exported model")
    generate.add_argument("--out", type=Path, required=True, help="the .h5ad to write")
    _add(generate, "--cells", 100, "cells")
    _add(generate, "--prompt", "", "first genes of every cell, ids or symbols separated by commas")
    _add(generate, "--temperature", 1.0, "divides the logits; 0 takes the likeliest gene")
    _add(generate, "--top-k", 0, "draw from this many likeliest genes; 0 draws from all")
    _add(generate, "--max-genes", 0, "most genes of a cell; 0 is tokens.max_tokens of the model")
    _add(generate, "--seed", 0, "random seed")
    _add(generate, "--batch-cells", 64, "cells drawn together; changes no cell")

    sweep = _command(stages, "sweep", "put the results of a sweep's runs side by side")
    sweep.add_argument("--values", type=Path, required=True, help="JSON file: values by axis of each run")
    sweep.add_argument("--runs", type=Path, required=True, help="folder of all runs")
    sweep.add_argument("--out", type=Path, required=True, help="results.csv; curves.json is written beside it")

    report = _stage(stages, "report", "write one page over all runs", None)
    report.add_argument("--runs", type=Path, nargs="+", required=True, help="folders of runs")
    report.add_argument("--corpora", type=Path, nargs="+", required=True, help="folders of corpora")
    report.add_argument("--sweeps", type=Path, nargs="*", default=[], help="files curves.json of sweeps")
    report.add_argument("--out", type=Path, required=True, help="index.html")


def _add_import(stages: Any) -> None:
    kinds = _command(stages, "import", "read published weights into a model folder").add_subparsers(
        dest="kind", required=True, metavar="MODEL"
    )
    for name, text in {"geneformer": "Geneformer V1 or V2", "scgpt": "pretrained scGPT"}.items():
        parser = _command(kinds, name, text)
        parser.add_argument("folder", type=Path, help="folder of the published files")
        parser.add_argument("--out", type=Path, required=True, help="model folder to write")
        if name == "scgpt":
            _add(parser, "--organism", "human", "organism of the gene symbols", choices=["human", "mouse"])
            _add(parser, "--max-tokens", 1200, "most tokens of a cell, <cls> counted", type=_count)
            continue
        pooling = "vector of a cell (default: cls with a token <cls>, as in V2, else mean)"
        parser.add_argument("--pooling", choices=["mean", "cls"], help=pooling)
        _add(parser, "--embed-layer", -1, "layer that is pooled: 0 is the last, -1 the one before")


def _add_convert(stages: Any) -> None:
    kinds = _command(stages, "convert", "write cells of other tools as .h5ad").add_subparsers(
        dest="kind", required=True, metavar="FORMAT"
    )
    ranks = _command(kinds, "geneformer", "token dataset of Geneformer: genes in rank order, without counts")
    ranks.add_argument("input", type=Path, help="folder that datasets.save_to_disk wrote")
    text = "folder with token_dictionary*.pkl and gene_median_dictionary*.pkl, with which the cells were tokenized"
    ranks.add_argument("--dictionaries", type=Path, required=True, help=text)
    shards = _command(kinds, "scmodelforge", "shards of scModelForge: counts")
    shards.add_argument("input", type=Path, help="folder with manifest.json and shard_000")
    shards.add_argument("--genes", type=Path, required=True, help="the gene vocabulary of the shards, a JSON file")
    cells = _command(kinds, "census", "cells of a SOMA experiment, such as one of CELLxGENE Census, by query")
    cells.add_argument("input", help="folder or URI of the experiment, such as …/soma/census_data/homo_sapiens")
    text = "SOMA's condition on obs, such as: tissue == 'lung' and is_primary_data == True (default: all cells)"
    cells.add_argument("--filter", dest="value_filter", help=text)
    _add(cells, "--counts", "X", "layer of the counts; X is raw")
    for parser in (ranks, shards, cells):
        parser.add_argument("--out", type=Path, required=True, help="the .h5ad to write")


def _add_archive(stages: Any) -> None:
    archive = _command(stages, "archive", "write the shards of a corpus in a fraction of their size")
    archive.add_argument("--manifest", type=Path, required=True, help="manifest.json of the shards")
    archive.add_argument("--out", type=Path, required=True, help="folder to write")

    unarchive = _command(stages, "unarchive", "restore archived shards, byte for byte")
    unarchive.add_argument("--archive", type=Path, required=True, help="folder that archive wrote")
    unarchive.add_argument("--out", type=Path, required=True, help="folder for the shards and manifest.json")

    planned = _command(stages, "plan_corpus", "estimate jobs, hours, memory and disk of making a corpus")
    _add(planned, "--config", CONFIG, "configuration")
    planned.add_argument("--corpus", required=True, help="name of the corpus")
    planned.add_argument("--cells", type=_count, help="cells in all (default: those of the table's files)")
    _add(planned, "--genes-per-cell", 2_000, "detected genes of a cell, on average", type=_count)


def _add_sharing(stages: Any) -> None:
    push = _command(stages, "push", "upload a model folder to the Hugging Face hub; the token is HF_TOKEN's")
    push.add_argument("--model", type=Path, required=True, help="folder of an exported model")
    push.add_argument("--repo", required=True, help="owner/name on the hub; it is made if there is none")
    licence = "licence of the model, as the hub names it: apache-2.0, other, …"
    push.add_argument("--licence", required=True, help=licence)
    push.add_argument("--private", action="store_true", help="make the repository private")
    export = _command(stages, "export", "write the embedder of a model folder for other runtimes")
    export.add_argument("--model", type=Path, required=True, help="folder of an exported model")
    export.add_argument("--format", choices=["onnx", "transformers"], required=True, help="transformers: of family hf")
    export.add_argument("--out", type=Path, required=True, help="the .onnx, or the folder, to write")
    pull = _command(stages, "pull", "download a model folder from the Hugging Face hub")
    pull.add_argument("repo", help="owner/name, or owner/name@revision")
    pull.add_argument("--out", type=Path, required=True, help="model folder to write")
    translate = _command(stages, "translate", "write a configuration of scModelForge as one of cellmill")
    translate.add_argument("file", type=Path, help="its YAML")
    written = "the .yaml to write; its table of datasets goes beside it"
    translate.add_argument("--out", type=Path, required=True, help=written)


def _add_machine_commands(stages: Any) -> None:
    kinds = _command(stages, "profiles", "write a profile for this cluster, or link the profiles for Snakemake")
    kinds = kinds.add_subparsers(dest="what", required=True, metavar="WHAT")
    install = _command(kinds, "install", "link the profiles into Snakemake's profile folder")
    _add(install, "--from", Path("profiles"), "folder of profiles", dest="source")

    new = _command(kinds, "new", "write a profile for a partition, from what SLURM says of it")
    new.add_argument("name", metavar="NAME", help="name of the profile")
    new.add_argument("--partition", default="", help="partition of the training (default: the most GPUs per node)")
    new.add_argument("--nodes", default="", help="number of nodes, or a range such as 2-4 (default: 1)")
    new.add_argument("--gpus", type=int, help="GPUs and processes per node; 0 for CPU cores (default: all of a node)")
    new.add_argument("--account", default="", help="account to charge (default: yours, if it is one or has a default)")
    new.add_argument("--qos", default="", help="quality of service (default: one that the partition asks for)")
    _add(new, "--into", Path("profiles"), "folder of profiles")

    about = "Check a profile's machine against the configuration, SLURM and its nodes."
    text = "check the machine before a big run is submitted"
    preflight = stages.add_parser("preflight", help=text, description=about)
    preflight.add_argument("--profile", required=True, help="name of the profile, or the path of its folder or file")
    _add(preflight, "--config", CONFIG, "configuration")
    preflight.add_argument("--no-job", action="store_true", help="do not submit a test job")
    _add(preflight, "--wait-min", 30.0, "minutes the test job may wait in the queue")
    _add(preflight, "--out", Path("results/preflight"), "folder shared with the nodes for NAME.json and the job")


def _add_run_commands(stages: Any) -> None:
    """Commands for runs that are queued, running or finished."""
    texts = {
        "status": "show the state of each run",
        "watch": "show a run live: loss, effective rank, throughput, time left",
        "attach": "follow the log of a run's job until it ends",
        "cancel": "stop a run and save its state",
        "logs": "print the log of a run",
        "follow": "send a run to a tracker, while it trains or afterwards",
    }
    for name, text in texts.items():
        parser = _command(stages, name, text)
        if name == "status":
            parser.add_argument("runs", nargs="*", metavar="RUN", help="names of runs (default: all)")
        else:
            parser.add_argument("run", metavar="RUN", help="name of the run")
        _add(parser, "--results", Path("results"), "folder of results")
        if name == "logs":
            parser.add_argument("--follow", action="store_true", help="follow it until the run ends")
        if name == "follow":
            parser.add_argument("--to", required=True, metavar="NAME", help="tracker, as in `track.to`")
        if name == "watch":
            _add(parser, "--every-s", 2.0, "seconds between updates", type=_seconds)


def _add_model_and_cells(parser: Any) -> None:
    parser.add_argument("--model", type=Path, required=True, help="folder of an exported model")
    parser.add_argument("--input", type=input_path, required=True, help=f"preprocessed or raw counts: {_INPUT}")
    _add(parser, "--counts", "X", "matrix of the counts: X, raw, the name of a layer, or a genome of a 10x file")


def _stage(stages: Any, name: str, text: str, owner: str | None) -> Any:
    parser = _command(stages, name, text)
    _add(parser, "--config", CONFIG, "configuration")
    if owner is not None:
        parser.add_argument(f"--{owner}", dest="name", help=f"name of the {owner}; required if there are several")
    parser.add_argument("--options", help="sections of the stage as JSON, or a file of it, instead of --config")
    return parser


def _command(stages: Any, name: str, text: str) -> Any:
    return stages.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")


def _add(parser: Any, flag: str, default: Any, text: str, **more: Any) -> None:
    """Add an option whose default gives its type and is part of its help."""
    text = f"{text} (default: {'none' if default == '' else default})".replace("%", "%%")
    parser.add_argument(flag, **{"type": type(default), "default": default, "help": text} | more)


def _add_given(parser: Any, section: str, *names: str) -> None:
    """Add flags that stand in for options of a section of the configuration."""
    options = sections_of(OPTIONS[section])[section]
    for name in names:
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=f"{section}.{name}",
            metavar="FRAC",
            help=f"{description(options, name)} (default: {section}.{name} of the configuration)".replace("%", "%%"),
        )


def add_machine(parser: Any, names: Iterable[str]) -> None:
    for name in names:
        default = Machine.model_fields[name].default
        _add(parser, f"--{name.replace('_', '-')}", default, description(Machine, name), type=str)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.1 <= number <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.1 to 3600, got {text!r}")
    return number


def _count(text: str) -> int:
    try:
        number = int(float(text))
    except (ValueError, OverflowError):
        number = 0
    if not 1 <= number <= 10**12:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 10^12, got {text!r}")
    return number
