"""Every option has an effect: changing it changes a corpus, a plan or the numbers of a training.

A new option needs an entry here: another value in CORPUS, PLAN or TRAIN, or in ELSEWHERE the test that sees its effect.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cellmill.cli import main
from cellmill.config.load import top_level
from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions, TrainOptions
from cellmill.config.plugin import Plugin
from cellmill.config.workflow import ENTRIES, sections_of
from cellmill.files import sha256_file
from cellmill.stages import plan
from tests.distributed.pool import Pool

ROOT = Path(__file__).resolve().parents[2]
BASE = """
preprocess: {min_genes: 5, min_cells: 1}
shard: {cells_per_shard: 100, val_frac: 0.2, test_frac: 0.2}
tokens: {max_tokens: 24}
stream: {lanes: 4, block_cells: 4, window_blocks: 2}
model: {hidden: 8, layers: 2, heads: 2}
objective: {name: masked_value}
train: {steps: 4, global_batch: 16, token_budget: 256, warmup_steps: 2, log_every_steps: 1, val_every_steps: 4}
"""
CORPUS = yaml.safe_load("""
preprocess: {min_genes: 125, min_counts: 3000, max_mito_frac: 0.03, min_cells: 120, keep_obs: [batch]}
vocabulary: {min_cells: 120, max_genes: 20, select: seurat, quantiles: yes, variability: yes}
shard: {cells_per_shard: 64, split_by: batch, val_frac: 0.1, test_frac: 0.4, seed: 1}
""")
PLAN = yaml.safe_load("""
model: {hidden: 16, layers: 3, ffn_hidden: 24, dropout: 0.1}
parallel: {strategy: ddp, sharding_strategy: NO_SHARD, shard_size: 4, tp: 2, sequence_parallel: yes, pp: 2,
  schedule: Interleaved1F1B, microbatches: 8, gradient_reduction: micro_batch, precision: bf16-mixed,
  activation_checkpointing: full, cpu_offload: optimizer}
train: {steps: 7, global_batch: 32, token_budget: 32, ema_decay: 0.9}
plan: {memory_gb: 9, memory_frac: 0.5, mfu_frac: 0.1, intra_node_gbs: 1, inter_node_gbs: 1}
""")
NEEDS = {
    "parallel.sequence_parallel": {"parallel": {"tp": 2}},
    "parallel.schedule": {"parallel": {"pp": 2}, "model": {"layers": 4, "hidden": 8, "heads": 2}},
    "parallel.microbatches": {"parallel": {"pp": 2}},
    "vocabulary.select": {"vocabulary": {"max_genes": 20}},
    "train.decay_frac": {"train": {"schedule": "wsd"}},
}
"""Options without which another is refused."""
TRAIN = yaml.safe_load("""
tokens: {tokenizer: binned, max_tokens: 12}
stream: {lanes: 8, block_cells: 8, window_blocks: 4, equal_steps: yes, train_frac: 0.5}
model: {heads: 1, pooling: attention}
objective: {name: masked_gene, mask_frac: 0.3, cell_loss_weight: 0}
train: {optimizer: muon, lr: 0.01, schedule: constant, decay_frac: 0.5, warmup_steps: 3, min_lr_frac: 0.5,
  weight_decay: 3, beta1: 0.5, beta2: 0.5, clip_norm: 0.001, seed: 1, val_every_steps: 2, val_cells: 8,
  checkpoint_every_steps: 2, checkpoint_every_min: 1.0e-9, log_every_steps: 2}
""")
ELSEWHERE = {
    "distributed/conformance.py": (
        "objective.loss objective.huber_delta objective.number_hidden objective.number_dropout "
        "objective.head_hidden objective.head_dropout"
    ),
    "unit/test_knock_out.py": (
        "knock_out.genes knock_out.cells knock_out.min_cells knock_out.null_genes knock_out.seed"
    ),
    "distributed/test_step_guard.py": "train.max_bad_steps",
    "distributed/test_branches.py": "train.keep_steps",
    "distributed/test_layouts.py": "parallel.compile",
    "distributed/test_loop.py": "train.best_metric train.profile_steps consolidate.checkpoint",
    "distributed/test_first_weights.py": "finetune.new_genes",
    "distributed/test_methods.py": (
        "finetune.trunk_lr_frac finetune.layer_decay finetune.head_steps finetune.block_steps "
        "finetune.last_blocks finetune.rank finetune.alpha finetune.targets"
    ),
    "distributed/test_predictions.py": (
        "objective.target_column objective.target_mean objective.target_std predict.min_probability "
        "predict.min_accuracy"
    ),
    "distributed/test_train_command.py": "stream.stage_to stream.stage_limit_gb train.timeout_s",
    "unit/test_autoregressive.py": "objective.value_loss_weight",
    "unit/test_cell_decoding.py": (
        "objective.batch_column objective.batch_adversary objective.batch_adversary_scale "
        "objective.weights objective.decoder_hidden objective.likelihood "
        "model.latent objective.decoder_layers objective.max_asked objective.undetected_ratio"
    ),
    "unit/test_labels.py": "objective.adversarial_scale objective.class_weights",
    "unit/test_config.py": "model.family evaluate.datasets corpora.table corpora.datasets runs.corpus",
    "unit/test_cell_encoder.py": (
        "tokens.covariates tokens.covariate_unknown_frac model.activation model.norm_eps model.ends model.cls_value"
    ),
    "unit/test_validation.py": "train.best_mode train.early_stop_patience train.early_stop_min_delta",
    "unit/test_distill.py": "objective.teacher objective.vectors",
    "unit/test_embed.py": "embed.token_budget embed.min_coverage_frac embed.min_expressed_frac",
    "unit/test_evaluate_stage.py": "evaluate.cells evaluate.folds evaluate.tasks evaluate.seed",
    "unit/test_external.py": "evaluate.external",
    "unit/test_gate.py": "evaluate.gate",
    "unit/test_gene_vectors.py": "model.gene_vectors model.gene_vector_dim model.train_gene_vectors",
    "unit/test_hf.py": "model.path model.revision model.weights model.architecture model.residue_ids",
    "unit/test_published.py": "model.pooling model.embed_layer",
    "unit/test_masked_model.py": "objective.random_frac objective.keep_frac objective.renormalize",
    "unit/test_export.py": "finetune.min_known_frac",
    "unit/test_genes.py": "preprocess.organism_column preprocess.reference_organism preprocess.orthologs",
    "unit/test_perturbation_response.py": "objective.perturbation_column objective.control objective.perturbed_genes",
    "unit/test_plan.py": "train.steps train.epochs",
    "unit/test_precision.py": "parallel.tf32 embed.precision evaluate.precision",
    "unit/test_preprocess.py": "preprocess.organism preprocess.min_coverage_frac preprocess.row_block",
    "unit/test_repeats.py": (
        "stream.weight_by stream.labelled_frac stream.weight_exponent stream.max_repeats stream.weight_warmup_steps "
        "stream.weight_start_exponent"
    ),
    "unit/test_report.py": "report.title",
    "unit/test_shard_parts.py": "preprocess.compression shard.duplicates shard.jobs",
    "unit/test_shards.py": "shard.train_values",
    "unit/test_size.py": "model.size",
    "unit/small_corpus.py": "stream.io_threads",
    "unit/test_sum.py": "objective.parts",
    "unit/test_supervised_contrastive.py": "objective.label_column objective.temperature",
    "unit/test_vocabulary.py": "vocabulary.genes vocabulary.protein_coding vocabulary.medians",
    "unit/test_tokens.py": (
        "tokens.bins tokens.binning tokens.max_value tokens.edges tokens.truncation tokens.zero_frac"
    ),
    "unit/test_trackers.py": "track.to track.observers",
    "unit/test_train_folder.py": "train.keep_checkpoints",
    "unit/test_views.py": (
        "objective.view objective.min_hidden_frac objective.max_hidden_frac objective.target "
        "objective.view_loss objective.invariance_weight objective.variance_weight objective.covariance_weight"
    ),
    "workflow/test_line.py": "runs.trunk runs.evaluate_steps runs.trunk_step runs.init_from runs.machine",
    "workflow/test_plugins.py": "finetune.method evaluate.classifiers",
}
"""Options by the file below tests/ whose tests change them."""


def cases(changes: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    return [(section, option) for section, options in changes.items() for option in options]


def options_of(section: type[Any]) -> set[str]:
    """Keys of a section, of every built-in choice where it has several."""
    models = section.built_in().values() if issubclass(section, Plugin) else [section]
    return {name for model in models for name in model.model_fields}


def test_every_option_has_an_entry() -> None:
    sections = {name: options_of(section) for name, section in top_level().items() if section is not None}
    for name, owner in ENTRIES.items():
        sections[name] = set(owner.model_fields) - set(sections_of(owner))
    every = {f"{section}.{option}" for section, options in sections.items() for option in options}
    changed = {".".join(case) for changes in (CORPUS, PLAN, TRAIN) for case in cases(changes)}
    elsewhere = {option: file for file, options in ELSEWHERE.items() for option in options.split()}
    assert every - changed - elsewhere.keys() == set(), "options without an entry"
    assert {*changed, *elsewhere} - every == set(), "entries without an option"
    for option, file in elsewhere.items():
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert option.split(".")[1] in text, f"{file} changes no {option}"


def with_option(changes: dict[str, dict[str, Any]], section: str, option: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """BASE with what the option needs, and the same with the option changed."""
    before = yaml.safe_load(BASE)
    for needed, values in NEEDS.get(f"{section}.{option}", {}).items():
        before[needed] = before.get(needed, {}) | values
    return before, before | {section: before.get(section, {}) | {option: changes[section][option]}}


def make_corpus(tree: dict[str, Any], folder: Path, raw: Path, first: str = "preprocess") -> dict[str, str]:
    """Digests of the data files that the stages from `first` on write; files of earlier stages are in `raw`."""
    folder.mkdir(parents=True)
    (folder / "datasets.tsv").write_text("dataset\tpath\nsim\traw.h5ad\n")
    config = folder / "config.yaml"
    entries = {"corpora": {"sim": {"table": str(folder / "datasets.tsv")}}, "runs": {"a": {"corpus": "sim"}}}
    config.write_text(yaml.safe_dump(tree | entries))
    stages = ("preprocess", "vocabulary", "shard")[("preprocess", "vocabulary", "shard").index(first) :]
    cells = (folder if "preprocess" in stages else raw) / "sim.h5ad"
    genes = (folder if "vocabulary" in stages else raw) / "vocabulary.tsv"
    commands = {
        "preprocess": f"--dataset sim --input {raw}/raw.h5ad --out {cells} --report {folder}/qc.json",
        "vocabulary": f"--cells {cells} --out {genes}",
        "shard": f"--cells {cells} --vocabulary {genes} --out {folder}/shards/manifest.json",
    }
    for stage in stages:
        assert main([stage, *commands[stage].split(), "--config", str(config)]) == 0
    files = [*folder.rglob("*.h5ad"), *folder.glob("vocabulary.tsv")]
    return {str(path.relative_to(folder)): sha256_file(path) for path in files}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Folder of a corpus made of BASE, and the digests of its files."""
    folder = tmp_path_factory.mktemp("base")
    raw = "--cells 240 --genes 150 --types 3 --batches 4 --seed 1"
    assert main(f"simulate --out {folder}/raw.h5ad {raw}".split()) == 0
    made = make_corpus(yaml.safe_load(BASE), folder / "corpus", folder)
    (folder / "corpus" / "raw.h5ad").symlink_to(folder / "raw.h5ad")
    return folder / "corpus", made


@pytest.mark.parametrize(("section", "option"), cases(CORPUS))
def test_the_option_changes_the_corpus(
    section: str, option: str, corpus: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    folder, before = corpus
    base, changed = with_option(CORPUS, section, option)
    if f"{section}.{option}" in NEEDS:
        before = make_corpus(base, tmp_path / "before", folder, first=section)
    made = make_corpus(changed, tmp_path / "corpus", folder, first=section)
    assert made.items() - before.items()


def run_options(model: Any, tree: dict[str, Any]) -> Any:
    """Options of a stage as `snakemake` hands them to it."""
    return model.model_validate({name: tree.get(name, {}) for name in model.model_fields})


def planned(tree: dict[str, Any], manifest: Path, out: Path) -> dict[str, Any]:
    machine = Machine(nodes="2", nproc_per_node=2, launcher="slurm")
    plan.plan(options=run_options(PlanOptions, tree), manifest=manifest, out=out, machine=machine, device="h100")
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def plans() -> dict[str, Any]:
    """Plans made before the change, by their options."""
    return {}


@pytest.mark.parametrize(("section", "option"), cases(PLAN))
def test_the_option_changes_the_plan(
    section: str, option: str, corpus: tuple[Path, dict[str, str]], plans: dict[str, Any], tmp_path: Path
) -> None:
    manifest = corpus[0] / "shards" / "manifest.json"
    before, after = with_option(PLAN, section, option)
    key = str(before)  # many options change the same plan
    if key not in plans:
        plans[key] = planned(before, manifest, tmp_path / "before.json")
    assert planned(after, manifest, tmp_path / "after.json") != plans[key]


@pytest.fixture(scope="module")
def process() -> Iterator[Pool]:
    pool = Pool(1, 1)
    yield pool
    pool.close()


Train = Callable[[dict[str, Any], Path], tuple[list[Any], list[str]]]


@pytest.fixture(scope="module")
def train(process: Pool, corpus: tuple[Path, dict[str, str]]) -> Train:
    """A training of one process: what it logged, and its checkpoints."""

    def run(tree: dict[str, Any], folder: Path) -> tuple[list[Any], list[str]]:
        options = {name: tree.get(name, {}) for name in TrainOptions.model_fields}
        lines = process.run("trained", corpus=str(corpus[0]), options=options, folder=str(folder), steps=4)[0]["lines"]
        return lines, sorted(path.name for path in (folder / "checkpoints").iterdir())

    return run


@pytest.fixture(scope="module")
def trained(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[str]]:
    return train(yaml.safe_load(BASE), tmp_path_factory.mktemp("trained"))


def test_the_same_options_give_the_same_training(train: Train, trained: Any, tmp_path: Path) -> None:
    assert train(yaml.safe_load(BASE), tmp_path) == trained


@pytest.mark.parametrize(("section", "option"), cases(TRAIN))
def test_the_option_changes_the_training(section: str, option: str, train: Train, trained: Any, tmp_path: Path) -> None:
    before, after = with_option(TRAIN, section, option)
    if f"{section}.{option}" in NEEDS:
        trained = train(before, tmp_path / "before")
    assert train(after, tmp_path / "after") != trained
