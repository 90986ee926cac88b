"""Arguments of every sub-command of `cellmill`, in one file: a table that is read as a whole."""

import argparse
import difflib
import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from cellmill import __version__
from cellmill.config.datasets import COUNTS_RULES, ObsColumns, input_path
from cellmill.config.machine import PLANNED, Machine
from cellmill.config.options import OPTIONS
from cellmill.config.section import description
from cellmill.config.workflow import sections_of

CONFIG = Path("config/config.yaml")

# a flag, or the name of a positional argument, and its options for argparse
Argument = tuple[str, dict[str, Any]]
YES = {"action": "store_true"}
NEEDED = {"required": True}
H5AD = "the .h5ad to write"
MANIFEST = "manifest.json of the shards"
MODEL = "folder of an exported model"
VOCABULARY = "vocabulary.tsv of the corpus"
FORMATS = "a file or folder in a format of docs/inputs.md, or a URL"
GROUPS = {
    "import": ("read published weights into a model folder", "kind", "MODEL"),
    "convert": ("write cells of other tools as .h5ad", "kind", "FORMAT"),
    "profiles": (
        "write a profile for this cluster, or link the profiles for Snakemake",
        "what",
        "WHAT",
    ),
}
"""Commands that are followed by the name of one of their kinds."""


class Parser(argparse.ArgumentParser):
    """Refuses an unknown option before a missing one, with the usage of its own command."""

    def __init__(self, **options: Any) -> None:
        self.flags: list[str] = []
        self.commands: Collection[str] = ()
        super().__init__(**options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        self.flags += action.option_strings
        return action

    def add_subparsers(self, **options: Any) -> Any:
        nested: Any = super().add_subparsers(**options)
        self.commands = nested.choices
        return nested

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        for word in words:
            if self.commands and not word.startswith("-"):
                if word not in self.commands:
                    self.refuse("command", word, self.commands)
                break
            if word == "--":
                break
            flag = word.partition("=")[0]
            is_known = any(name.startswith(flag) for name in self.flags)
            if flag.startswith("--") and " " not in flag and not is_known:
                self.refuse("option", flag, self.flags)
        parsed, rest = super().parse_known_args(words, namespace)
        if rest:
            kind = "option" if rest[0].startswith("-") else "argument"
            self.refuse(kind, rest[0], self.flags)
        return parsed, rest

    def refuse(self, kind: str, word: str, names: Collection[str]) -> NoReturn:
        """End with the usage of the command, and with the closest of `names`."""
        hint = f"see {self.prog} --help"
        close = difflib.get_close_matches(word, names, n=1)
        if close:
            hint = f"did you mean {close[0]}?"
        elif self.prog == "cellmill run":
            hint = "options of snakemake come after --, as in: cellmill run -- --cores 4"
        self.error(f"unknown {kind} {word}; {hint}")


def new_parser(description: str) -> Parser:
    top = Parser(prog="cellmill", description=description)
    top.add_argument("--version", action="version", version=f"cellmill {__version__}")
    parents: dict[str, Any] = {"": top.add_subparsers(dest="stage", required=True, metavar="STAGE")}
    for name, (text, *arguments) in COMMANDS.items():
        group, _, kind = name.rpartition(" ")
        if group not in parents:
            about, dest, metavar = GROUPS[group]
            nested = _command(parents[""], group, about).add_subparsers(
                dest=dest, required=True, metavar=metavar
            )
            parents[group] = nested
        parser = _command(parents[group], kind, text)
        for flag, options in arguments:
            parser.add_argument(flag, **options)
    return top


def _command(parent: Any, name: str, text: str) -> Any:
    return parent.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")


def option(flag: str, text: str, **options: Any) -> Argument:
    return flag, {"help": text.replace("%", "%%"), **options}


def value(flag: str, default: Any, text: str, **options: Any) -> Argument:
    """An option whose default gives its type and is part of its help."""
    text = f"{text} (default: {'none' if default == '' else default})"
    return option(flag, text, **{"type": type(default), "default": default} | options)


def files(**texts: str) -> list[Argument]:
    """Required paths, with their help by name."""
    return [option(f"--{name}", text, type=Path, required=True) for name, text in texts.items()]


def some(flag: str, text: str, **options: Any) -> Argument:
    """Several paths."""
    return option(flag, text, **{"type": Path, "nargs": "+", "required": True} | options)


def stage(owner: str, without: str = "required if there are several") -> list[Argument]:
    """Where the options of a stage come from, by hand the section of a run or corpus, its `owner`.

    `without` says what a missing name means.
    """
    named = option(f"--{owner}", f"name of the {owner}; {without}", dest="name")
    return [CONFIGURATION, named, SECTIONS]


def given(section: str, *names: str) -> list[Argument]:
    """Flags that stand in for options of a section of the configuration."""
    options = sections_of(OPTIONS[section])[section]
    texts = {
        name: f"{description(options, name)} (default: {section}.{name} of the configuration)"
        for name in names
    }
    return [
        option(_flag(name), text, dest=f"{section}.{name}", metavar="FRAC")
        for name, text in texts.items()
    ]


def machine(names: Iterable[str]) -> list[Argument]:
    """Keys of `set-resources: train:` of the profile, one flag each."""
    defaults = {name: Machine.model_fields[name].default for name in names}
    return [
        value(_flag(name), default, description(Machine, name), type=str)
        for name, default in defaults.items()
    ]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def count(text: str) -> int:
    """A whole number from 1, which may be written as 1e6."""
    with suppress(ValueError, OverflowError):
        number = int(float(text))
        if 1 <= number <= 10**12:
            return number
    raise argparse.ArgumentTypeError(f"expected a number from 1 to 10^12, got {text!r}")


PUBLISHED = "folder of the published files"
CONFIGURATION = value("--config", CONFIG, "configuration")
SECTIONS = option(
    "--options", "sections of the stage as JSON, or a file of it, instead of --config"
)
CELLS = some("--cells", "preprocessed .h5ad files")
OUT_MODEL = files(out="model folder to write")
RUN = [
    option("run", "name of the run", metavar="RUN"),
    value("--results", Path("results"), "folder of results"),
]

# fmt: off
INPUT = [
    option("--input", f"preprocessed or raw counts: {FORMATS}", type=input_path, **NEEDED),
    value("--counts", "X", "matrix of the counts: X, raw, the name of a layer, or a genome of a 10x file"),
    option("--counts-rule", "estimated counts with fractions: refuse, round, or stochastic, a draw that keeps sums",
           choices=COUNTS_RULES, default="refuse"),
    option("--gene-column", "column of var that names the genes, or index (default: the one that names most)"),
]
EMBEDDED = [
    *INPUT,
    option("--append", "write all of the .h5ad --input too, which --out may be, instead of obs alone", **YES),
    *given("embed", "min_coverage_frac", "min_expressed_frac"),
]
# stages that need an exported model alone
EXPORTED = stage("run", "without it, the default options are used")
ATLAS = option("--atlas", "folder of the atlas (default: atlas in the model's folder)", type=Path)
EVALUATED = [
    *stage("run"), *files(model=MODEL, manifest=f"{MANIFEST} it was trained on"),
    some("--ancestors", "manifests of the runs its initial weights came from", nargs="*", required=False, default=[]),
]


COMMANDS: dict[str, tuple[Any, ...]] = {
    "demo": ("write the demo data: 700 real PBMC", *files(out=H5AD)),
    "simulate": ("write simulated cells, or proteins",
        *files(out=f"{H5AD}, or a .fasta for proteins"),
        value("--cells", 2000, "cells, or proteins"),
        value("--genes", 2000, "genes, the first protein-coding of the human table"),
        value("--types", 8, "cell types, the leaves of a tree, or protein families"),
        value("--batches", 2, "technical batches"),
        value("--perturbations", 0, "perturbed genes, in addition to the control"),
        value("--seed", 0, "random seed")),
    "fetch": ("copy the input of a dataset from a URL into the cache",
        option("--input", "URL of a file or folder: s3://, gs://, az://, https://, …", **NEEDED),
        option("--cache", "folder (default: CELLMILL_CACHE, else ~/.cache/cellmill)", type=Path),
        *files(out="the .fetched.json to write: path, SHA-256 and size")),
    "preprocess": ("read, filter and annotate the counts of one dataset",
        *stage("corpus"), *INPUT,
        option("--dataset", "name of the dataset", **NEEDED),
        *(option(_flag(name), description(ObsColumns, name)) for name in ObsColumns.model_fields),
        option("--source", "origin of the data, for the report", default=""),
        option("--licence", "licence of the data, for the report", default=""),
        *files(report="the QC report (.json) to write", out=H5AD)),
    "vocabulary": ("collect the genes of a corpus and their medians",
        *stage("corpus"), CELLS,
        option("--split", "options of the section shard, as JSON: held-out cells are left out (default: all are read)"),
        *files(out="vocabulary.tsv")),
    "divide": ("plan shards that several jobs write",
        *stage("corpus"), CELLS, *files(vocabulary=VOCABULARY, out="plan.json, in a folder beside the manifest")),
    "shard_part": ("write a part of the shards",
        *stage("corpus"), CELLS,
        option("--part", "which of how many, such as 3-of-8", **NEEDED),
        *files(vocabulary=VOCABULARY, out="file that says that the part is done, in the folder of the plan")),
    "shard": ("write train, val and test shards",
        *stage("corpus"), CELLS, *files(vocabulary=VOCABULARY, out="manifest.json; shards go beside it")),

    "plan": ("estimate memory and time of a run before it is submitted",
        *stage("run"), *machine(PLANNED),
        option("--manifest", f"{MANIFEST} (default: the corpus's in results, without --cells and --genes)", type=Path),
        option("--out", "plan.json to write (default: none)", type=Path),
        value("--device", "cpu", "device of each process, such as h100"),
        option("--suggest", "print the best layouts instead of the plan", **YES),
        option("--cells", "number of training cells assumed without a manifest (default: 1000000)", type=count),
        option("--genes", "number of genes assumed without a manifest (default: 20000)", type=count)),
    "train": ("train a run, or resume it",
        *stage("run"),
        *files(manifest=MANIFEST, vocabulary=VOCABULARY, out="folder for checkpoints, metrics.jsonl, status.json"),
        option("--init-from", f"{MODEL} with the initial weights", type=Path),
        option("--trunk", "folder of a checkpoint of another run, which this one continues", type=Path),
        option("--teacher", "folder that stage teach wrote, for objective distill", type=Path),
        option("--restart", "set a training of other options or data in the folder aside and start afresh", **YES),
        *machine(Machine.model_fields)),
    "consolidate": ("export a checkpoint as a self-contained model",
        *stage("run"), *files(train="folder of the training run", vocabulary=VOCABULARY), *OUT_MODEL),

    "embed": ("embed the cells of a dataset with an exported model",
        *EXPORTED, *files(model=MODEL, out=f"{H5AD}, with obsm['X_cellmill']"), *EMBEDDED),
    "predict": ("label the cells of a dataset with an exported classifier",
        *EXPORTED, *files(model=MODEL, out=f"{H5AD}, with obs['cellmill_label']"), *EMBEDDED,
        *given("predict", "min_probability", "min_accuracy")),
    "impute": ("predict the expression of genes that a dataset lacks",
        *EXPORTED, *files(model=MODEL, out=f"{H5AD}: cells by predicted genes"), *INPUT,
        option("--genes", "ids or symbols (default: all genes of the model that the dataset lacks)", nargs="+",
               metavar="GENE"),
        *given("embed", "min_coverage_frac", "min_expressed_frac")),
    "perturb": ("predict the response of a dataset's control cells to perturbations",
        *EXPORTED, *files(model=MODEL, out=f"{H5AD}: perturbations by genes"), *INPUT,
        option("--perturbations", "perturbations, combinations as A+B (default: all that the model was trained on)",
               nargs="+", metavar="NAME"),
        option("--perturbation-column", "obs column of perturbations (default: the model's; without it, all cells are "
               "controls)", metavar="COLUMN"),
        option("--control", "value of untreated cells in this column (default: the model's)", metavar="VALUE"),
        option("--by", "obs column, such as of cell types: a response for each value (default: none)",
               metavar="COLUMN"),
        *given("embed", "min_coverage_frac", "min_expressed_frac")),
    "atlas": ("index the embeddings of a corpus's cells, for map",
        *EXPORTED, *files(model=MODEL), ATLAS,
        some("--embeddings", "by stage embed, one file per dataset"),
        some("--labels", "obs column of the labels of each file, in the same order; '-' for none", type=str),
        option("--donor-columns", "obs columns of the donors, separated by commas: the first that a file has counts "
               "(default: atlas.donor_columns of the configuration)", dest="atlas.donor_columns",
               type=lambda text: text.split(","), metavar="COLUMNS"),
        option("--neighbors", "neighbours of a cell that vote (default: atlas.neighbors of the configuration)",
               dest="atlas.neighbors", metavar="K")),
    "map": ("label the cells of a dataset by the most similar cells of the model's atlas",
        *EXPORTED, *files(model=MODEL, out=f"{H5AD}, with obs['cellmill_label']; a .map.tsv goes beside it"), ATLAS,
        *EMBEDDED, *given("map", "refuse_frac", "certainty")),
    "seen": ("find the cells of a dataset that a model was trained on",
        *files(model=MODEL), *INPUT,
        option("--rows", "print the row and name of each such cell", **YES),
        option("--out", "table (.tsv) to write: exact, near or new for each cell", type=Path)),
    "knock_out": ("remove genes one by one and measure how far embeddings move",
        *EXPORTED, *files(model=MODEL, out=f"{H5AD}: cells by genes"), *INPUT),
    "embed_external": ("embed the cells of a dataset by a command of another environment",
        option("--name", "name in evaluate.external", **NEEDED),
        option("--command", "program and arguments, with {cells} and {out} among them", **NEEDED),
        *files(input="preprocessed .h5ad", out=f"{H5AD}, for evaluate --external")),
    "teach": ("collect a teacher's vectors of the cells of shards, for objective distill",
        some("--embeddings", "DATASET.h5ad of each dataset, by stage embed or with vectors in obsm['X_emb'] or X"),
        *files(manifest=MANIFEST, out="folder of vectors.json and vectors.npy")),
    "evaluate": ("evaluate embeddings on held-out cells next to baselines",
        *EVALUATED, *files(out="metrics.json"),
        some("--cells", f"preprocessed: {FORMATS}", type=input_path),
        some("--embeddings", "one per file of --cells, in the same order"),
        some("--labels", "obs columns per file, separated by |; '-' for none", type=str),
        option("--baselines", "folder that keeps predictions of baselines for other runs", type=Path),
        some("--external", "of embed_external or zoo: one per model of evaluate.external for the first file of --cells,"
             " then the next", nargs="*", required=False, default=[])),
    "predict_changes": ("predict expression under held-out perturbations, for bridges",
        *EVALUATED, *files(embedding="of the cells, by stage embed", out=H5AD),
        option("--cells", f"preprocessed: {FORMATS}", type=input_path, **NEEDED),
        value("--labels", "-", "obs columns separated by |; '-' for none")),
    "generate": ("draw cells from an exported model of family autoregressive",
        *files(model=MODEL, out=H5AD),
        value("--cells", 100, "cells"),
        value("--prompt", "", "first genes of every cell, ids or symbols separated by commas"),
        value("--temperature", 1.0, "divides the logits; 0 takes the likeliest gene"),
        value("--top-k", 0, "draw from this many likeliest genes; 0 draws from all"),
        value("--max-genes", 0, "most genes of a cell; 0 is tokens.max_tokens of the model"),
        value("--seed", 0, "random seed"),
        value("--batch-cells", 64, "cells drawn together; changes no cell")),

    "sweep": ("put the results of a sweep's runs side by side",
        *files(values="JSON file: values by axis of each run", runs="folder of all runs"),
        *files(out="results.csv; curves.json is written beside it")),
    "report": ("write one page over all runs",
        CONFIGURATION, SECTIONS,
        some("--runs", "folders of runs"),
        some("--corpora", "folders of corpora"),
        some("--sweeps", "files curves.json of sweeps", nargs="*", required=False, default=[]),
        *files(out="index.html")),

    "import geneformer": ("Geneformer V1 or V2",
        option("folder", PUBLISHED, type=Path), *OUT_MODEL,
        option("--pooling", "vector of a cell (default: cls with a token <cls>, as in V2, else mean)",
               choices=["mean", "cls"]),
        value("--embed-layer", -1, "layer that is pooled: 0 is the last, -1 the one before")),
    "import scgpt": ("pretrained scGPT",
        option("folder", PUBLISHED, type=Path), *OUT_MODEL,
        value("--organism", "human", "organism of the gene symbols", choices=["human", "mouse"]),
        value("--max-tokens", 1200, "most tokens of a cell, <cls> counted", type=count)),
    "convert geneformer": ("token dataset of Geneformer: genes in rank order, without counts",
        option("input", "folder that datasets.save_to_disk wrote", type=Path),
        *files(dictionaries="folder with token_dictionary*.pkl and gene_median_dictionary*.pkl, with which the cells "
               "were tokenized", out=H5AD)),
    "convert scmodelforge": ("shards of scModelForge: counts",
        option("input", "folder with manifest.json and shard_000", type=Path),
        *files(genes="the gene vocabulary of the shards, a JSON file", out=H5AD)),
    "convert census": ("cells of a SOMA experiment, such as one of CELLxGENE Census, by query",
        option("input", "folder or URI of the experiment, such as …/soma/census_data/homo_sapiens"),
        option("--filter", "SOMA's condition on obs, such as: tissue == 'lung' and is_primary_data == True (default: "
               "all cells)", dest="value_filter"),
        value("--counts", "X", "layer of the counts; X is raw"),
        *files(out=H5AD)),
    "unpack": ("write a shard, or cells that preprocess wrote, for other programs",
        option("input", "the .h5ad with packed cells", type=Path), *files(out=H5AD)),
    "plan_corpus": ("estimate jobs, hours, memory and disk of making a corpus",
        CONFIGURATION,
        option("--corpus", "name of the corpus", **NEEDED),
        option("--cells", "cells in all (default: those of the table's files)", type=count),
        value("--genes-per-cell", 2_000, "detected genes of a cell, on average", type=count)),
    "options": ("search the options of the configuration by name, type, default and description",
        option("words", "all of them must be there; upper and lower case are the same", nargs="+", metavar="WORD")),
    "push": ("upload a model folder to the Hugging Face hub; the token is HF_TOKEN's",
        option("--repo", "owner/name on the hub; it is made if there is none", **NEEDED),
        option("--licence", "licence of the model, as the hub names it: apache-2.0, other, …; required", default=""),
        option("--private", "make the repository private", **YES),
        *files(model=MODEL)),
    "export": ("write the embedder of a model folder for other runtimes",
        option("--format", "transformers: of family hf", choices=["onnx", "transformers"], **NEEDED),
        *files(model=MODEL, out="the .onnx, or the folder, to write")),
    "pull": ("download a model folder from the Hugging Face hub",
        option("repo", "owner/name, or owner/name@revision"), *OUT_MODEL),
    "translate": ("write a configuration of scModelForge as one of cellmill",
        option("file", "its YAML", type=Path),
        *files(out="the .yaml to write; its table of datasets goes beside it")),

    "init": ("write a project for your files: configuration, table, profile, Snakefile",
        option("folder", "folder of the project; it must be new or empty", type=Path, metavar="FOLDER"),
        option("--data", "files or folders in a format of docs/inputs.md, patterns in quotes, or URLs",
               nargs="+", metavar="PATH", **NEEDED),
        option("--skip-unreadable", "write the project without files that cannot be used", **YES)),
    "check": ("open the files of a configuration, and say what will be skipped and why", CONFIGURATION),
    "run": ("run the workflow of this folder by snakemake, and print the path of the report",
        value("--profile", "profiles/local", "profile of the machine"),
        option("words", "targets and options of snakemake, after --", nargs="*", metavar="WORD")),

    "profiles install": ("link the profiles into Snakemake's profile folder",
        value("--from", Path("profiles"), "folder of profiles", dest="source")),
    "profiles new": ("write a profile for a partition, from what SLURM says of it",
        option("name", "name of the profile", metavar="NAME"),
        option("--cluster", "cluster, for sites with several (default: the one of this host)", default=""),
        option("--partition", "partition of the training (default: the most GPUs per node)", default=""),
        option("--nodes", "number of nodes, or a range such as 2-4 (default: 1)", default=""),
        option("--gpus", "GPUs and processes per node; 0 for CPU cores (default: all of a node)", type=int),
        option("--account", "account to charge (default: yours, if it is one or has a default)", default=""),
        option("--qos", "quality of service (default: one that the partition asks for)", default=""),
        value("--into", Path("profiles"), "folder of profiles")),
    "preflight": ("check the machine before a big run is submitted",
        option("--profile", "name of the profile, or the path of its folder or file", **NEEDED),
        CONFIGURATION,
        option("--no-job", "do not submit a test job", **YES),
        option("--node", "only test this node, and exclude it from new jobs or lift that", default="", metavar="NODE"),
        value("--wait-min", 30.0, "minutes the test job may wait in the queue"),
        value("--out", Path("results/preflight"), "folder shared with the nodes for NAME.json and the job"), RUN[1]),
    "status": ("show the state of each run",
        option("runs", "names of runs (default: all)", nargs="*", metavar="RUN"), RUN[1]),
    "watch": ("show a run live: loss, effective rank, throughput, time left",
        value("--every-s", 2.0, "seconds between updates"), *RUN),
    "attach": ("follow the log of a run's job until it ends", *RUN),
    "cancel": ("stop a run and save its state", *RUN),
    "logs": ("print the log of a run", option("--follow", "follow it until the run ends", **YES), *RUN),
    "follow": ("send a run to a tracker, while it trains or afterwards",
        option("--to", "tracker, as in `track.to`", metavar="NAME", **NEEDED), *RUN),
}
