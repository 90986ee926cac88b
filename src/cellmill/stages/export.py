"""Stages that make model folders: consolidate, from a checkpoint, and pull, from the hub.

consolidate exports a checkpoint as a self-contained model: weights, configuration, vocabulary,
model card. It is one process on a CPU, with the whole model in memory. Anything that a fine-tuning
method added is merged, so an export is always a plain model. `config.json` is written last: its
existence means that the rest is complete.
"""

import importlib
import shutil
import sys
from pathlib import Path

from jinja2 import StrictUndefined, Template

from cellmill.config import check_options
from cellmill.config.load import Tree, stored_options
from cellmill.config.options import ConsolidateOptions
from cellmill.config.parts.family import WEIGHTS_FORMAT
from cellmill.config.parts.methods import MethodConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.shards.cell_digests import ENTRY, FILE, CellDigests, digest_corpus, write_digests
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import DataError
from cellmill.evaluate.inference.calibration import (
    NO_VALIDATION,
    calibrate_head,
    find_classifications,
    find_regressions,
)
from cellmill.evaluate.seen.training_cells import find_shards, find_training_cells_of_run
from cellmill.files import write_json
from cellmill.finetune.method import load_method
from cellmill.models.build import build
from cellmill.models.export import RIDGE, fill_buffers, spec_of, write_model, write_tensors
from cellmill.models.family import Model
from cellmill.models.objectives.cell_decoding import CellDecoding
from cellmill.parallel.materialize import named_tensors, to_empty
from cellmill.runs.folder import Checkpoint, TrainFolder
from cellmill.train.stored import load_whole, read_index

PREFIX = "model."
AVERAGE = "average."  # prefix of the average of trained weights, which is exported in their place


def consolidate(*, options: ConsolidateOptions, train: Path, vocabulary: Path, out: Path) -> None:
    """Export the chosen checkpoint of the training folder `train` to the folder `out`."""
    checkpoint = _choose(TrainFolder(train), options.consolidate.checkpoint)
    state = checkpoint.state()
    version = state["identity"].get("weights_format", 1)
    if version != WEIGHTS_FORMAT:
        raise DataError(
            f"{checkpoint.path}: expected weights of format {WEIGHTS_FORMAT}, got {version}; train it again"
        )
    genes = Vocabulary.read(vocabulary)
    if genes.digest != state["vocabulary_digest"]:
        raise DataError(
            f"{vocabulary}: its digest is {genes.digest[:12]}, the checkpoint was trained with "
            f"{state['vocabulary_digest'][:12]}; use the vocabulary it was trained with"
        )
    spec = spec_of(state["options"] | {"levels": state.get("levels", {})}, genes.n_genes)
    method = load_method(
        check_options(MethodConfig, state["options"].get("finetune", {}), f"{checkpoint.path}")
    )
    model = to_empty(build(spec, method.transform), "cpu")
    _load(checkpoint, model)
    adapter = method.adapter(model)
    if adapter is not None:  # merging overwrites its parameters
        adapter = adapter[0], {name: tensor.clone() for name, tensor in adapter[1].items()}
    method.merge(model)
    tensors = model.state_dict()
    differing = sorted(tensors.keys() ^ build(spec).state_dict().keys())
    if differing:
        raise DataError(
            f"finetune.method {method.config.method}: merge leaves another model: {differing[0]}"
        )
    (out / "config.json").unlink(missing_ok=True)
    shutil.rmtree(out / "adapter", ignore_errors=True)  # left by an earlier export
    (out / FILE).unlink(missing_ok=True)
    if adapter is not None:  # in the layout of the package peft, its configuration last
        write_tensors(out / "adapter" / "adapter_model.safetensors", adapter[1])
        described = {"base_model_name_or_path": state.get("init_from")} | adapter[0]
        write_json(out / "adapter" / "adapter_config.json", described)
    trained_with = state["options"]
    progress = state["progress"]
    about: Tree = {
        "fingerprint": state["fingerprint"],
        "init_from": state.get("init_from"),
        "supervised_by": state.get("supervised_by", []),
        "weighted_by": trained_with.get("stream", {}).get("weight_by"),
        "step": progress["step"],
        # that of an earlier step is not of these weights
        "val_loss": progress["val_loss"] if progress["val_step"] == progress["step"] else None,
        "ema_decay": trained_with["train"].get("ema_decay"),
        "seed": trained_with["train"]["seed"],
        "levels": state.get("levels"),
    }
    for key in ("weighted_by", "ema_decay", "levels"):  # left out if a run has none
        if about[key] is None:
            del about[key]
    about |= _heads(model, genes, state, train)
    if options.consolidate.cell_digests:
        about |= list_cells(out, train, state["fingerprint"])
    (out / RIDGE).unlink(missing_ok=True)
    if options.consolidate.hidden_genes == "ensemble":
        about |= _write_ridge(model, genes, spec.tokens, state, train, out)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    write_model(
        out, trained_with, genes, tensors, about, lambda config: model_card(config, n_parameters)
    )
    print(f"{out}: step {progress['step']}, {len(tensors)} tensors")


def _choose(folder: TrainFolder, which: str | int) -> Checkpoint:
    if isinstance(which, int):
        return folder.find_checkpoint(which)
    newest, damaged = folder.newest_whole()
    for line in damaged:
        print(f"warning: {line}; exporting the previous one", file=sys.stderr)
    # `best` refuses a folder without any
    return folder.best() if which == "best" or newest is None else newest


def _load(checkpoint: Checkpoint, model: Model) -> None:
    """Load parameters and persistent buffers into `model`, on the CPU."""
    model_tensors = {
        name: tensor.detach() for name, tensor in named_tensors(model, persistent=True)
    }
    tensors = {PREFIX + name: tensor for name, tensor in model_tensors.items()}
    names = read_index(checkpoint.path)
    saved = {name for name in names if name.startswith(PREFIX)}
    differing = sorted(saved ^ tensors.keys())
    if differing:
        raise DataError(
            f"{checkpoint.path}: expected the tensors of its options' model, which differ in {differing[0]} "
            f"({len(differing)} in all); train it again"
        )
    for name, tensor in model_tensors.items():
        if AVERAGE + name in names:
            del tensors[PREFIX + name]
            tensors[AVERAGE + name] = tensor
    load_whole(checkpoint.path, tensors)


def _heads(model: Model, genes: Vocabulary, state: Tree, train: Path) -> Tree:
    """Tree of config.json for `predict` (see `evaluate.inference.predict`); empty without such heads."""
    entries: Tree = {}
    regressors = {}
    for name, regression in find_regressions(model.objective).items():
        regressors[name] = {"target_column": regression.config.target_column}
    if regressors:
        entries["regressors"] = regressors
    heads = find_classifications(model.objective)
    if not heads:
        return entries
    options = stored_options(state["options"], f"{train}: its checkpoint")
    fill_buffers(model, options.train.seed, genes)
    shards, problem = find_shards(train, options, state["fingerprint"])
    classifiers: Tree = {}
    for name, head in heads.items():
        entry: Tree = {
            "label_column": head.config.label_column,
            "labels": head.label_names,
        }
        calibration = None
        if shards is not None:
            calibration = calibrate_head(model.eval(), options, shards, head)
        if calibration is None:
            why = problem or NO_VALIDATION
            entry |= {"uncalibrated": why, "calibration": None}
            print(f"warning: {train}: probabilities are not calibrated: {why}")
        else:
            entry["calibration"] = vars(calibration)
            print(_calibration_line(entry))
        classifiers[name] = entry
    entries["classifier"] = classifiers.pop(next(iter(classifiers)))
    if classifiers:
        entries["more_classifiers"] = classifiers
    return entries


def list_cells(out: Path, train: Path, fingerprint: str) -> Tree:
    """Write digests of the cells of the run and of the models before it to the folder `out`, and
    return the entry of config.json; without the run's shards, print a warning and return none.
    """
    training = find_training_cells_of_run(train, fingerprint)
    if training.missing_reason:
        print(f"warning: {train}: no digests of its cells: {training.missing_reason}")
        return {}
    corpora = dict(training.listed)
    for name in training.manifests.keys() - training.listed.keys():
        corpora[name] = digest_corpus(training.manifests[name])
    digests = CellDigests(dict(sorted(corpora.items())), training.missing_ancestors)
    entry = write_digests(out, digests)
    print(f"{out / FILE}: digests of {entry['n_cells']:,} training and validation cells")
    return {ENTRY: entry}


def _write_ridge(
    model: Model, genes: Vocabulary, tokens: Tokens, state: Tree, train: Path, out: Path
) -> Tree:
    """Write the regression for hidden genes, and return its entry of config.json; empty without one."""
    options = stored_options(state["options"], f"{train}: its checkpoint")
    decodes = any(isinstance(x, CellDecoding) for x in model.objective.parts_by_name().values())
    if options.model.family != "profile" or not decodes:
        return {}
    shards, problem = find_shards(train, options, state["fingerprint"])
    if shards is None:
        print(f"warning: {train}: no ridge regression for hidden genes: {problem}")
        return {}
    seed = options.train.seed
    fill_buffers(model, seed, genes)
    manifest = Manifest.read(shards)
    # other exports do without scikit-learn
    fitting = importlib.import_module("cellmill.evaluate.hidden_genes.fit_ridge")
    ridge = fitting.fit_ridge(
        fitting.EvaluatedModel(model.eval(), {}, genes, tokens, manifest, seed)
    )
    return {} if ridge is None else {"ridge": ridge.write(out)}


def model_card(config: Tree, parameters: int) -> str:
    """Return the README of an export: the model, its training, and its limits (model_card.md)."""
    classifiers = [config.get("classifier"), *config.get("more_classifiers", {}).values()]
    template = Template(
        Path(__file__).with_name("model_card.md").read_text(encoding="utf-8"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return template.render(
        **{"ema_decay": None, "weighted_by": None, "regressors": {}, "ridge": None, ENTRY: None}
        | config,
        parameters=parameters,
        architecture=_listed(config["model"], "family"),
        goal=_objective(config["objective"]),
        predicted=[(entry, _calibration_line(entry)) for entry in classifiers if entry],
    )


def _calibration_line(classifier: Tree) -> str:
    calibration = classifier["calibration"]
    if calibration is None:
        return f"not calibrated: {classifier.get('uncalibrated', NO_VALIDATION)}"
    return (
        f"accuracy {calibration['accuracy']:.3f} on {calibration['n_cells']:,} validation cells, calibration error "
        f"{calibration['calibration_error']:.3f} with temperature {calibration['temperature']:.2f} "
        f"({calibration['calibration_error_uncalibrated']:.3f} without)"
    )


def _listed(options: Tree, name: str) -> str:
    """Options in a row of the card, without `name`, nulls and mappings."""
    words = []
    for key, value in options.items():
        if key != name and value is not None and not isinstance(value, dict):
            words.append(f"{key} {value}")
    return ", ".join(words)


def _objective(options: Tree) -> str:
    """Name and options of an objective, or of the parts of a sum, for a row of the card."""
    if "parts" in options:
        parts = [_objective({"name": name} | part) for name, part in options["parts"].items()]
        return f"{options['name']} of {'; '.join(parts)}"
    return f"{options['name']}: {_listed(options, 'name')}".removesuffix(": ")


def pull(*, repo: str, out: Path) -> None:
    """Download the model `repo` (owner/name, or owner/name@revision) to the folder `out`."""
    commit = importlib.import_module("cellmill.models.hub").pull(repo, out)
    print(f"{repo} at {commit[:12]} -> {out}")
