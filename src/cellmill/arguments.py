"""Arguments of every sub-command of `cellmill`, in one file: a table that is read as a whole."""

import argparse
from collections.abc import Iterable
from contextlib import suppress
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
PLANNED = ("nodes", "nproc_per_node", "mem_mb")  # options of the machine that plan reads too
_INPUT = f"{', '.join((*INPUTS, *plugin.names('input')))}, or a URL"
_H5AD = "the .h5ad to write"
_MANIFEST = "manifest.json of the shards"
_MODEL = "folder of an exported model"
_MODEL_OUT = "model folder to write"
_VOCABULARY = "vocabulary.tsv of the corpus"


def new_parser(description: str) -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="cellmill", description=description)
    top.add_argument("--version", action="version", version=f"cellmill {__version__}")
    stages = top.add_subparsers(dest="stage", required=True, metavar="STAGE")
    for add in (_add_corpus, _add_training, _add_model, _add_exchange, _add_machine_commands, _add_run_commands):
        add(stages)
    return top


def _add_corpus(stages: Any) -> None:
    demo = _command(stages, "demo", "write the demo data: 700 real PBMC")
    _files(demo, out=_H5AD)

    simulate = _command(stages, "simulate", "write simulated cells, or proteins")
    _files(simulate, out=f"{_H5AD}, or a .fasta for proteins")
    _add(simulate, "--cells", 2000, "cells, or proteins")
    _add(simulate, "--genes", 2000, "genes, the first protein-coding of the human table")
    _add(simulate, "--types", 8, "cell types, the leaves of a tree, or protein families")
    _add(simulate, "--batches", 2, "technical batches")
    _add(simulate, "--perturbations", 0, "perturbed genes, in addition to the control")
    _add(simulate, "--seed", 0, "random seed")

    fetch = _command(stages, "fetch", "copy the input of a dataset from a URL into the cache")
    fetch.add_argument("--input", required=True, help="URL of a file or folder: s3://, gs://, az://, https://, …")
    fetch.add_argument("--cache", type=Path, help="folder (default: CELLMILL_CACHE, else ~/.cache/cellmill)")
    _files(fetch, out="the .fetched.json to write: path, SHA-256 and size")

    preprocess = _stage(stages, "preprocess", "read, filter and annotate the counts of one dataset", "corpus")
    _add_input(preprocess)
    preprocess.add_argument("--dataset", required=True, help="name of the dataset")
    for name in ObsColumns.model_fields:
        preprocess.add_argument(f"--{name.replace('_', '-')}", help=description(ObsColumns, name).replace("%", "%%"))
    preprocess.add_argument("--round-counts", action="store_true", help="round fractional counts")
    preprocess.add_argument("--source", default="", help="origin of the data, for the report")
    preprocess.add_argument("--licence", default="", help="licence of the data, for the report")
    _files(preprocess, report="the QC report (.json) to write", out=_H5AD)

    vocabulary = _stage(stages, "vocabulary", "collect the genes of a corpus and their medians", "corpus")
    divide = _stage(stages, "divide", "plan shards that several jobs write", "corpus")
    part = _stage(stages, "shard_part", "write a part of the shards", "corpus")
    part.add_argument("--part", required=True, help="which of how many, such as 3-of-8")
    shard = _stage(stages, "shard", "write train, val and test shards", "corpus")
    for stage in (vocabulary, divide, part, shard):
        stage.add_argument("--cells", type=Path, nargs="+", required=True, help="preprocessed .h5ad files")
    _files(vocabulary, out="vocabulary.tsv")
    _files(divide, vocabulary=_VOCABULARY, out="plan.json, in a folder beside the manifest")
    _files(part, vocabulary=_VOCABULARY, out="file that says that the part is done, in the folder of the plan")
    _files(shard, vocabulary=_VOCABULARY, out="manifest.json; shards go beside it")


def _add_training(stages: Any) -> None:
    plan = _stage(stages, "plan", "estimate memory and time of a run before it is submitted", "run")
    plan.add_argument("--manifest", type=Path, help=f"{_MANIFEST}; without it a corpus is assumed")
    plan.add_argument("--out", type=Path, help="plan.json to write (default: none)")
    add_machine(plan, PLANNED)
    _add(plan, "--device", "cpu", "device of each process, such as h100")
    plan.add_argument("--suggest", action="store_true", help="print the best layouts instead of the plan")
    _add(plan, "--cells", 1_000_000, "number of cells assumed without a manifest", type=_count)
    _add(plan, "--genes", 20_000, "number of genes assumed without a manifest", type=_count)

    train = _stage(stages, "train", "train a run, or resume it", "run")
    _files(train, manifest=_MANIFEST, vocabulary=_VOCABULARY, out="folder for checkpoints, metrics.jsonl, status.json")
    train.add_argument("--init-from", type=Path, help=f"{_MODEL} with the initial weights")
    train.add_argument("--trunk", type=Path, help="folder of a checkpoint of another run, which this one continues")
    train.add_argument("--teacher", type=Path, help="folder that stage teach wrote, for objective distill")
    restart = "set a training of other options or data in the folder aside and start afresh"
    train.add_argument("--restart", action="store_true", help=restart)
    add_machine(train, PLANNED)
    group = train.add_argument_group("machine", "`set-resources: train:` of the profile, one flag per key")
    add_machine(group, [name for name in Machine.model_fields if name not in PLANNED])

    consolidate = _stage(stages, "consolidate", "export a checkpoint as a self-contained model", "run")
    _files(consolidate, train="folder of the training run", vocabulary=_VOCABULARY, out=_MODEL_OUT)


def _add_model(stages: Any) -> None:
    embed = _stage(stages, "embed", "embed the cells of a dataset with an exported model", "run")
    predict = _stage(stages, "predict", "label the cells of a dataset with an exported classifier", "run")
    for stage, column in ((embed, "obsm['X_cellmill']"), (predict, "obs['cellmill_label']")):
        _files(stage, model=_MODEL, out=f"{_H5AD}, with {column}")
        _add_input(stage)
        whole = "write all of the .h5ad --input too, which --out may be, instead of obs alone"
        stage.add_argument("--append", action="store_true", help=whole)
        _add_given(stage, "embed", "min_coverage_frac", "min_expressed_frac")
    _add_given(predict, "predict", "min_probability", "min_accuracy")
    knock_out = _stage(stages, "knock_out", "remove genes one by one and measure how far embeddings move", "run")
    _files(knock_out, model=_MODEL, out=f"{_H5AD}: cells by genes")
    _add_input(knock_out)

    external = _command(stages, "embed_external", "embed the cells of a dataset by a command of another environment")
    external.add_argument("--name", required=True, help="name in evaluate.external")
    external.add_argument("--command", required=True, help="program and arguments, with {cells} and {out} among them")
    _files(external, input="preprocessed .h5ad", out=f"{_H5AD}, for evaluate --external")

    teach = _command(stages, "teach", "collect a teacher's vectors of the cells of shards, for objective distill")
    _files(teach, manifest=_MANIFEST, out="folder of vectors.json and vectors.npy")
    embedded = "DATASET.h5ad of each dataset, by stage embed or with vectors in obsm['X_emb'] or X"
    teach.add_argument("--embeddings", type=Path, nargs="+", required=True, help=embedded)

    evaluate = _stage(stages, "evaluate", "evaluate embeddings on held-out cells next to baselines", "run")
    changes = _stage(stages, "predict_changes", "predict expression under held-out perturbations, for bridges", "run")
    for stage, out in ((evaluate, "metrics.json"), (changes, _H5AD)):
        _files(stage, model=_MODEL, manifest=f"{_MANIFEST} it was trained on", out=out)
        ancestors = "manifests of the runs its initial weights came from"
        stage.add_argument("--ancestors", type=Path, nargs="*", default=[], help=ancestors)
        several = {"nargs": "+"} if stage is evaluate else {}
        stage.add_argument("--cells", type=input_path, required=True, help=f"preprocessed: {_INPUT}", **several)
    changes.add_argument("--embedding", type=Path, required=True, help="of the cells, by stage embed")
    embeddings = "one per file of --cells, in the same order"
    evaluate.add_argument("--embeddings", type=Path, nargs="+", required=True, help=embeddings)
    labels = "obs columns per file, separated by |; '-' for none"
    evaluate.add_argument("--labels", nargs="+", required=True, help=labels)
    evaluate.add_argument("--baselines", type=Path, help="folder that keeps predictions of baselines for other runs")
    beside = "of embed_external or zoo: one per model of evaluate.external for the first file of --cells, then the next"
    evaluate.add_argument("--external", type=Path, nargs="*", default=[], help=beside)

    generate = _command(stages, "generate", "draw cells from an exported model of family autoregressive")
    _files(generate, model=_MODEL, out=_H5AD)
    _add(generate, "--cells", 100, "cells")
    _add(generate, "--prompt", "", "first genes of every cell, ids or symbols separated by commas")
    _add(generate, "--temperature", 1.0, "divides the logits; 0 takes the likeliest gene")
    _add(generate, "--top-k", 0, "draw from this many likeliest genes; 0 draws from all")
    _add(generate, "--max-genes", 0, "most genes of a cell; 0 is tokens.max_tokens of the model")
    _add(generate, "--seed", 0, "random seed")
    _add(generate, "--batch-cells", 64, "cells drawn together; changes no cell")

    sweep = _command(stages, "sweep", "put the results of a sweep's runs side by side")
    _files(sweep, values="JSON file: values by axis of each run", runs="folder of all runs")
    _files(sweep, out="results.csv; curves.json is written beside it")

    report = _stage(stages, "report", "write one page over all runs", None)
    report.add_argument("--runs", type=Path, nargs="+", required=True, help="folders of runs")
    report.add_argument("--corpora", type=Path, nargs="+", required=True, help="folders of corpora")
    report.add_argument("--sweeps", type=Path, nargs="*", default=[], help="files curves.json of sweeps")
    _files(report, out="index.html")


def _add_exchange(stages: Any) -> None:
    kinds = _kinds(stages, "import", "read published weights into a model folder", "kind", "MODEL")
    geneformer = _command(kinds, "geneformer", "Geneformer V1 or V2")
    scgpt = _command(kinds, "scgpt", "pretrained scGPT")
    for parser in (geneformer, scgpt):
        parser.add_argument("folder", type=Path, help="folder of the published files")
        _files(parser, out=_MODEL_OUT)
    pooling = "vector of a cell (default: cls with a token <cls>, as in V2, else mean)"
    geneformer.add_argument("--pooling", choices=["mean", "cls"], help=pooling)
    _add(geneformer, "--embed-layer", -1, "layer that is pooled: 0 is the last, -1 the one before")
    _add(scgpt, "--organism", "human", "organism of the gene symbols", choices=["human", "mouse"])
    _add(scgpt, "--max-tokens", 1200, "most tokens of a cell, <cls> counted", type=_count)

    kinds = _kinds(stages, "convert", "write cells of other tools as .h5ad", "kind", "FORMAT")
    ranks = _command(kinds, "geneformer", "token dataset of Geneformer: genes in rank order, without counts")
    ranks.add_argument("input", type=Path, help="folder that datasets.save_to_disk wrote")
    pickles = "folder with token_dictionary*.pkl and gene_median_dictionary*.pkl, with which the cells were tokenized"
    _files(ranks, dictionaries=pickles, out=_H5AD)
    shards = _command(kinds, "scmodelforge", "shards of scModelForge: counts")
    shards.add_argument("input", type=Path, help="folder with manifest.json and shard_000")
    _files(shards, genes="the gene vocabulary of the shards, a JSON file", out=_H5AD)
    cells = _command(kinds, "census", "cells of a SOMA experiment, such as one of CELLxGENE Census, by query")
    cells.add_argument("input", help="folder or URI of the experiment, such as …/soma/census_data/homo_sapiens")
    text = "SOMA's condition on obs, such as: tissue == 'lung' and is_primary_data == True (default: all cells)"
    cells.add_argument("--filter", dest="value_filter", help=text)
    _add(cells, "--counts", "X", "layer of the counts; X is raw")
    _files(cells, out=_H5AD)

    archive = _command(stages, "archive", "write the shards of a corpus in a fraction of their size")
    _files(archive, manifest=_MANIFEST, out="folder to write")
    unarchive = _command(stages, "unarchive", "restore archived shards, byte for byte")
    _files(unarchive, archive="folder that archive wrote", out="folder for the shards and manifest.json")
    planned = _command(stages, "plan_corpus", "estimate jobs, hours, memory and disk of making a corpus")
    _add(planned, "--config", CONFIG, "configuration")
    planned.add_argument("--corpus", required=True, help="name of the corpus")
    planned.add_argument("--cells", type=_count, help="cells in all (default: those of the table's files)")
    _add(planned, "--genes-per-cell", 2_000, "detected genes of a cell, on average", type=_count)

    push = _command(stages, "push", "upload a model folder to the Hugging Face hub; the token is HF_TOKEN's")
    push.add_argument("--repo", required=True, help="owner/name on the hub; it is made if there is none")
    licence = "licence of the model, as the hub names it: apache-2.0, other, …"
    push.add_argument("--licence", required=True, help=licence)
    push.add_argument("--private", action="store_true", help="make the repository private")
    _files(push, model=_MODEL)
    export = _command(stages, "export", "write the embedder of a model folder for other runtimes")
    export.add_argument("--format", choices=["onnx", "transformers"], required=True, help="transformers: of family hf")
    _files(export, model=_MODEL, out="the .onnx, or the folder, to write")
    pull = _command(stages, "pull", "download a model folder from the Hugging Face hub")
    pull.add_argument("repo", help="owner/name, or owner/name@revision")
    _files(pull, out=_MODEL_OUT)
    translate = _command(stages, "translate", "write a configuration of scModelForge as one of cellmill")
    translate.add_argument("file", type=Path, help="its YAML")
    _files(translate, out="the .yaml to write; its table of datasets goes beside it")


def _add_machine_commands(stages: Any) -> None:
    text = "write a profile for this cluster, or link the profiles for Snakemake"
    kinds = _kinds(stages, "profiles", text, "what", "WHAT")
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

    preflight = _command(stages, "preflight", "check the machine before a big run is submitted")
    preflight.add_argument("--profile", required=True, help="name of the profile, or the path of its folder or file")
    _add(preflight, "--config", CONFIG, "configuration")
    preflight.add_argument("--no-job", action="store_true", help="do not submit a test job")
    _add(preflight, "--wait-min", 30.0, "minutes the test job may wait in the queue")
    _add(preflight, "--out", Path("results/preflight"), "folder shared with the nodes for NAME.json and the job")


def _add_run_commands(stages: Any) -> None:
    status = _command(stages, "status", "show the state of each run")
    status.add_argument("runs", nargs="*", metavar="RUN", help="names of runs (default: all)")
    watch = _command(stages, "watch", "show a run live: loss, effective rank, throughput, time left")
    _add(watch, "--every-s", 2.0, "seconds between updates")
    attach = _command(stages, "attach", "follow the log of a run's job until it ends")
    cancel = _command(stages, "cancel", "stop a run and save its state")
    logs = _command(stages, "logs", "print the log of a run")
    logs.add_argument("--follow", action="store_true", help="follow it until the run ends")
    follow = _command(stages, "follow", "send a run to a tracker, while it trains or afterwards")
    follow.add_argument("--to", required=True, metavar="NAME", help="tracker, as in `track.to`")
    for parser in (watch, attach, cancel, logs, follow):
        parser.add_argument("run", metavar="RUN", help="name of the run")
    for parser in (status, watch, attach, cancel, logs, follow):
        _add(parser, "--results", Path("results"), "folder of results")


def _stage(stages: Any, name: str, text: str, owner: str | None) -> Any:
    parser = _command(stages, name, text)
    _add(parser, "--config", CONFIG, "configuration")
    if owner is not None:
        parser.add_argument(f"--{owner}", dest="name", help=f"name of the {owner}; required if there are several")
    parser.add_argument("--options", help="sections of the stage as JSON, or a file of it, instead of --config")
    return parser


def _command(stages: Any, name: str, text: str) -> Any:
    return stages.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")


def _kinds(stages: Any, name: str, text: str, dest: str, metavar: str) -> Any:
    """Add a command that is followed by the name of one of its kinds."""
    return _command(stages, name, text).add_subparsers(dest=dest, required=True, metavar=metavar)


def _files(parser: Any, **texts: str) -> None:
    """Add required paths, with their help by name."""
    for name, text in texts.items():
        parser.add_argument(f"--{name}", type=Path, required=True, help=text)


def _add_input(parser: Any) -> None:
    parser.add_argument("--input", type=input_path, required=True, help=f"preprocessed or raw counts: {_INPUT}")
    _add(parser, "--counts", "X", "matrix of the counts: X, raw, the name of a layer, or a genome of a 10x file")


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


def _count(text: str) -> int:
    """A whole number from 1, which may be written as 1e6."""
    with suppress(ValueError, OverflowError):
        if 1 <= (number := int(float(text))) <= 10**12:
            return number
    raise argparse.ArgumentTypeError(f"expected a number from 1 to 10^12, got {text!r}")
