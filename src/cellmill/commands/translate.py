"""translate: a configuration of scModelForge becomes one of cellmill, each key with a line.

The line begins with *written* (its value is in the new file), *advice* (what to set or do instead)
or *dropped* (it had no effect there, or has no counterpart here).
"""

import copy
from math import prod
from pathlib import Path
from typing import Any

import yaml

from cellmill.config.load import Tree, check_config, read_yaml
from cellmill.errors import ConfigError
from cellmill.files import write_text
from cellmill.track.run_config import flatten_options

TABLES: dict[str, Tree] = yaml.safe_load(
    Path(__file__).with_name("scmodelforge.yaml").read_text(encoding="utf-8")
)
"""Tables of keys by what becomes of them; the file has a sentence on each table."""
BATCH = {"batch_size": 64, "num_gpus": 1, "gradient_accumulation": 1}
"""Factors of a global batch, with scModelForge's defaults."""

Answers = dict[str, tuple[str, str]]
"""Written, advice or dropped, and a text, by key of the file."""


def translate(*, file: Path, out: Path) -> None:
    """Write `out`, and its table as .tsv next to it. Raise ConfigError if either tool refuses it."""
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"{out}: expected a name that ends in .yaml; its table is next to it as .tsv"
        )
    table = out.with_suffix(".tsv")
    for path in (out, table):
        if path.exists():
            raise ConfigError(f"{path} exists; choose another --out")
    tree = read_yaml(file)
    if not isinstance(tree, dict) or not isinstance(tree.get("data"), dict) or "model" not in tree:
        raise ConfigError("expected a configuration of scModelForge, with sections data and model")
    paths = tree["data"].get("paths") or []
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) for path in paths):
        raise ConfigError(
            f"data.paths: expected a list of .h5ad files, got {paths or 'none'}; add them"
        )
    config, answers = translate_options(flatten_options(tree))
    config["corpora"] = {"corpus": {"table": str(table)}}
    config["runs"] = {"translated": {"corpus": "corpus"}}
    answers["data.paths"] = ("written", f"column path of {table}")
    rows = [f"{Path(path).stem}\t{path}" for path in paths]
    write_text(table, "\n".join(["dataset\tpath", *rows, ""]))
    try:
        check_config(config, str(file))
    except ConfigError:
        table.unlink()  # or the next try would find it there
        raise
    write_text(out, yaml.safe_dump(config, sort_keys=False))
    lines = (f"{mark:<8} {key}: {text}" for key, (mark, text) in answers.items())
    print("\n".join([*lines, f"{file} -> {out}, {table}"]))


def translate_options(options: Tree) -> tuple[Tree, Answers]:
    """Translate scModelForge's options, by dotted key, to sections of a configuration.

    Also return what became of each key. Raise ConfigError if a factor of the batch is no integer.
    """
    config: Tree = {"tokens": {"tokenizer": "rank"}}
    for key, value in TABLES["defaults"].items():
        if key not in options:
            _translate_key(config, key, value)
    answers = {key: _translate_key(config, key, value) for key, value in options.items()}
    if "vocabulary" in config:
        _put(config, "vocabulary.select", "seurat")

    factors = [options.get(f"training.{key}") or default for key, default in BATCH.items()]
    wrong = [value for value in factors if type(value) is not int]
    if wrong:
        raise ConfigError(
            f"training: expected a whole number for {', '.join(BATCH)}, got {wrong[0]!r}"
        )
    _put(config, "train.global_batch", prod(factors))
    product = f"train.global_batch: {prod(factors)} = {' x '.join(map(str, factors))} ({', '.join(BATCH)})"
    for key in BATCH:
        if f"training.{key}" in options:
            answers[f"training.{key}"] = ("written", product)
    if "training.num_gpus" in options:
        text = f"{product}; set nproc_per_node in the profile too"
        answers["training.num_gpus"] = ("written", text)

    tokens = config["tokens"]
    if tokens["tokenizer"] == "binned":
        quantiles = options.get("tokenizer.binning_method", "uniform") == "quantile"
        tokens |= {
            "bins": options.get("tokenizer.n_bins", 51),
            "binning": "quantile_corpus" if quantiles else "uniform",
        }
        if quantiles:  # fitted to the corpus
            _put(config, "vocabulary.quantiles", True)
        for key, ours in (("n_bins", "bins"), ("binning_method", "binning")):
            if f"tokenizer.{key}" in options:
                answers[f"tokenizer.{key}"] = ("written", f"tokens.{ours}: {tokens[ours]}")
    objective = "masked_gene" if tokens["tokenizer"] == "rank" else "masked_value"
    _put(config, "objective.name", objective)
    if options.get("training.wandb_project") and "wandb" in config.get("track", {}).get("to", {}):
        config["track"]["to"]["wandb"]["project"] = options["training.wandb_project"]
        answers["training.wandb_project"] = ("written", "track.to.wandb.project")
    return config, answers


def _translate_key(config: Tree, key: str, value: Any) -> tuple[str, str]:
    """Put one key into `config`, and return what became of it."""
    ours = TABLES["same"].get(key)
    if ours is not None:
        if value is None:
            return "dropped", f"null: {ours} has its default"
        _put(config, ours, value)
        return "written", ours
    if key in TABLES["choices"]:
        [(ours, choices)] = TABLES["choices"][key].items()
        if str(value) not in choices:
            return "advice", f"{value}: none here; set {ours}"
        choice = choices[str(value)]
        _put(config, ours, copy.deepcopy(choice))
        text = yaml.safe_dump(choice, default_flow_style=True).splitlines()[0]
        return "written", f"{ours}: {text}"
    section = key
    while section:  # the key itself, or the next section above it
        if section in TABLES["no_effect"]:
            return "dropped", f"had no effect there either: {TABLES['no_effect'][section]}"
        if section in TABLES["none_here"]:
            return "dropped", f"none here: {TABLES['none_here'][section]}"
        if section in TABLES["elsewhere"]:
            return "advice", str(TABLES["elsewhere"][section])
        section = section.rpartition(".")[0]
    return "dropped", "unknown to scModelForge too"


def _put(config: Tree, key: str, value: Any) -> None:
    section, name = key.split(".")
    config.setdefault(section, {})[name] = value
