"""Every option has an effect: changing it changes a corpus, a plan or the numbers of a training.

A new option needs another value here, in CORPUS, PLAN or TRAIN, or a test elsewhere that sets it
and sees its effect, and is named in SHARED if another section has an option of that name.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import cache
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

TESTS = Path(__file__).resolve().parents[1]
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
train: {steps: 7, global_batch: 32, token_budget: 32, ema_decay: 0.9, replay_every_steps: 4}
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
SHARED = {
    "unit/test_config.py": "corpora.datasets evaluate.datasets",
    "unit/test_embed.py": "embed.token_budget embed.min_coverage_frac",
    "unit/test_precision.py": "embed.precision evaluate.precision",
    "unit/test_evaluate_stage.py": "evaluate.cells evaluate.seed",
    "unit/test_knock_out.py": "knock_out.genes knock_out.cells knock_out.min_cells knock_out.seed",
    "unit/test_hf.py": "model.weights",
    "unit/test_cell_decoding.py": "objective.weights",
    "unit/test_preprocess.py": "preprocess.min_coverage_frac",
    "unit/test_vocabulary.py": "vocabulary.genes",
}
"""Options set elsewhere whose names several sections have, by the file below tests/ whose tests
change them.
"""


def cases(changes: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    pairs = []
    for section, options in changes.items():
        pairs += [(section, option) for option in options]
    return pairs


def options_of(section: type[Any]) -> set[str]:
    """Keys of a section, of every built-in choice where it has several."""
    models = section.built_in().values() if issubclass(section, Plugin) else [section]
    return set().union(*(model.model_fields for model in models))


def test_every_option_is_set_by_a_test() -> None:
    sections = {
        name: options_of(section) for name, section in top_level().items() if section is not None
    }
    for name, owner in ENTRIES.items():
        sections[name] = set(owner.model_fields) - set(sections_of(owner))
    every = {*cases(sections)}
    here = {*cases(CORPUS), *cases(PLAN), *cases(TRAIN)}
    assert here - every == set(), "values of options that do not exist"
    files = {*TESTS.rglob("*.py")} - {Path(__file__).resolve(), TESTS / "golden.py"}
    texts = {path.relative_to(TESTS).as_posix(): path.read_text(encoding="utf-8") for path in files}
    own = {}
    for file, options in SHARED.items():
        for option in options.split():
            own[tuple(option.split("."))] = file
    n_sections = Counter(option for _, option in every)
    assert own.keys() == {case for case in every - here if n_sections[case[1]] > 1}
    set_in = {
        case: texts[own[case]] if case in own else "\n".join(texts.values())
        for case in every - here
    }
    unset = {
        case for case, text in set_in.items() if not re.search(rf"\b{case[1]}\b[\"']?\s*[:=]", text)
    }
    assert unset == set(), "options that no test sets"


def with_option(
    changes: dict[str, dict[str, Any]], section: str, option: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """BASE with what the option needs, and the same with the option changed."""
    before = yaml.safe_load(BASE)
    for needed, values in NEEDS.get(f"{section}.{option}", {}).items():
        before[needed] = before.get(needed, {}) | values
    return before, before | {section: before.get(section, {}) | {option: changes[section][option]}}


def make_corpus(
    tree: dict[str, Any], folder: Path, raw: Path, first: str = "preprocess"
) -> dict[str, str]:
    """Digests of the data files that the stages from `first` on write; files of earlier stages are
    in `raw`.
    """
    folder.mkdir(parents=True)
    (folder / "datasets.tsv").write_text("dataset\tpath\nsim\traw.h5ad\n")
    config = folder / "config.yaml"
    entries = {
        "corpora": {"sim": {"table": str(folder / "datasets.tsv")}},
        "runs": {"a": {"corpus": "sim"}},
    }
    config.write_text(yaml.safe_dump(tree | entries))
    stages = ("preprocess", "vocabulary", "shard")[
        ("preprocess", "vocabulary", "shard").index(first) :
    ]
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


@cache  # many options change the same plan
def planned(tree: str, manifest: Path) -> dict[str, Any]:
    sections = yaml.safe_load(tree)
    out = manifest.with_name("plan.json")
    options = PlanOptions.model_validate(
        {name: sections.get(name, {}) for name in PlanOptions.model_fields}
    )
    machine = Machine(nodes="2", nproc_per_node=2, launcher="slurm")
    plan.plan(options=options, manifest=manifest, out=out, machine=machine, device="h100")
    return json.loads(out.read_text())


@pytest.mark.parametrize(("section", "option"), cases(PLAN))
def test_the_option_changes_the_plan(
    section: str, option: str, corpus: tuple[Path, dict[str, str]]
) -> None:
    manifest = corpus[0] / "shards" / "manifest.json"
    before, after = map(yaml.safe_dump, with_option(PLAN, section, option))
    assert planned(before, manifest) != planned(after, manifest)


@pytest.fixture(scope="module")
def process() -> Iterator[Pool]:
    with closing(Pool(1, 1)) as pool:
        yield pool


Train = Callable[[dict[str, Any], Path], tuple[list[Any], list[str]]]


@pytest.fixture(scope="module")
def train(process: Pool, corpus: tuple[Path, dict[str, str]]) -> Train:
    """A training of one process: what it logged, and its checkpoints."""

    def run(tree: dict[str, Any], folder: Path) -> tuple[list[Any], list[str]]:
        options = {name: tree.get(name, {}) for name in TrainOptions.model_fields}
        lines = process.run(
            "trained", corpus=str(corpus[0]), options=options, folder=str(folder), steps=4
        )[0]["lines"]
        return lines, sorted(path.name for path in (folder / "checkpoints").iterdir())

    return run


@pytest.fixture(scope="module")
def trained(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[str]]:
    return train(yaml.safe_load(BASE), tmp_path_factory.mktemp("trained"))


def test_the_same_options_give_the_same_training(
    train: Train, trained: Any, tmp_path: Path
) -> None:
    assert train(yaml.safe_load(BASE), tmp_path) == trained


@pytest.mark.parametrize(("section", "option"), cases(TRAIN))
def test_the_option_changes_the_training(
    section: str, option: str, train: Train, trained: Any, tmp_path: Path
) -> None:
    before, after = with_option(TRAIN, section, option)
    if f"{section}.{option}" in NEEDS:
        trained = train(before, tmp_path / "before")
    assert train(after, tmp_path / "after") != trained
