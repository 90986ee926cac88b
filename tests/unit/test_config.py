"""Configuration: defaults, overrides, words of other tools, and the one-line error for every mistake."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cellmill.config import OPTIONS, Workflow, check_config, check_options, load_config
from cellmill.config.load import top_level
from cellmill.config.plugin import BUILT_IN
from cellmill.config.section import other_words
from cellmill.errors import ConfigError
from tests.checks import refused

TREE = """
corpora: {pbmc: {table: TABLE}}
train: {epochs: 2, global_batch: 16}
runs: {demo: {corpus: pbmc}}
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "datasets.tsv"
    path.write_text("dataset\tpath\tlabel\nsim\traw.h5ad\tcell_type\nother\tother.h5ad\t\n")
    return path


@dataclasses.dataclass
class Config:
    """A small configuration; a call checks it with sections replaced or, if they are mappings, updated."""

    table: Path

    def tree(self, **sections: Any) -> dict[str, Any]:
        tree: dict[str, Any] = yaml.safe_load(TREE.replace("TABLE", str(self.table)))
        for name, value in sections.items():
            both = isinstance(value, dict) and isinstance(tree.get(name), dict)
            tree[name] = tree[name] | value if both else value
        return tree

    def __call__(self, **sections: Any) -> Workflow:
        return check_config(self.tree(**sections))

    def refused(self, **sections: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            self(**sections)
        return str(caught.value)


@pytest.fixture
def config(table: Path) -> Config:
    return Config(table)


def test_a_run_has_every_section_with_its_defaults_and_cannot_be_changed(config: Config) -> None:
    run = config().runs["demo"]
    assert (run.train.epochs, run.train.steps, run.train.lr) == (2, None, 1e-3)
    assert (run.tokens.tokenizer, run.model.family, run.parallel.strategy) == ("continuous", "encoder", "fsdp")
    assert run.model.model_dump() == run.model.model_dump(mode="json")
    assert config(model=None, report=None).runs["demo"].model == run.model
    with pytest.raises(ValueError, match="frozen"):
        run.train.lr = 1.0  # type: ignore[misc]


def test_a_run_overrides_single_keys_of_a_default_section(config: Config) -> None:
    pipeline = config(
        model={"hidden": 64, "layers": 2},
        runs={"demo": {"corpus": "pbmc"}, "deep": {"corpus": "pbmc", "model": {"layers": 9}, "train": {"lr": 0.5}}},
    )
    plain, deep = pipeline.runs["demo"], pipeline.runs["deep"]
    assert deep.model.model_dump() == plain.model.model_dump() | {"layers": 9}
    assert deep.train.model_dump() == plain.train.model_dump() | {"lr": 0.5}
    train = config(runs={"demo": {"corpus": "pbmc", "train": {"steps": "auto"}}}).runs["demo"].train
    assert (train.steps, train.epochs) == ("auto", None), "a length replaces the default length"


def test_a_run_with_another_tokenizer_keeps_the_options_that_all_tokenizers_have(config: Config) -> None:
    rank = {"tokens": {"tokenizer": "rank"}, "objective": {"name": "masked_gene"}}
    same = {"tokens": {"tokenizer": "binned", "max_tokens": 99}}
    tree = {"runs": {name: {"corpus": "pbmc"} | run for name, run in (("plain", {}), ("rank", rank), ("same", same))}}
    runs = config(tokens={"tokenizer": "binned", "bins": 10, "max_tokens": 100}, **tree).runs
    keys = {"tokenizer", "max_tokens", "bins"}
    assert {name: runs[name].tokens.model_dump(include=keys) for name in ("plain", "rank", "same")} == {
        "plain": {"tokenizer": "binned", "max_tokens": 100, "bins": 10},
        "rank": {"tokenizer": "rank", "max_tokens": 100},
        "same": {"tokenizer": "binned", "max_tokens": 99, "bins": 10},
    }


def test_a_corpus_overrides_defaults_and_the_others_keep_them(config: Config, table: Path) -> None:
    pipeline = config(
        preprocess={"min_genes": 9}, corpora={"mouse": {"table": str(table), "preprocess": {"organism": "mouse"}}}
    )
    assert pipeline.corpora["mouse"].preprocess.organism == "mouse"
    assert pipeline.corpora["mouse"].preprocess.min_genes == 9
    assert pipeline.corpora["pbmc"].preprocess.organism == "human"


def test_a_number_that_yaml_loads_as_text_is_a_number(config: Config) -> None:
    assert config(train={"lr": "3e-4"}).runs["demo"].train.lr == 3e-4


@pytest.mark.parametrize("stage", OPTIONS)
def test_a_stage_is_handed_its_own_sections_and_takes_them_back_from_json(config: Config, stage: str) -> None:
    pipeline = config()
    name = "pbmc" if stage in ("preprocess", "vocabulary", "divide", "shard_part", "shard") else "demo"
    sections = json.loads(json.dumps(pipeline.section(stage, name)))
    assert set(sections) == set(OPTIONS[stage].model_fields)
    options = check_options(OPTIONS[stage], sections, "--options")
    assert options.model_dump(mode="json") == sections


def test_a_corpus_and_an_evaluation_have_the_datasets_they_name_in_the_order_of_the_table(
    config: Config, table: Path
) -> None:
    assert config().trained_on("pbmc") == config().evaluated_on("demo") == ["sim", "other"]
    assert config(evaluate={"datasets": ["other"]}).evaluated_on("demo") == ["other"]
    named = {"pbmc": {"table": str(table), "datasets": ["other", "sim"]}}
    assert config(corpora=named).trained_on("pbmc") == ["sim", "other"]
    one = config(corpora={"pbmc": {"table": str(table), "datasets": ["other"]}})
    assert one.trained_on("pbmc") == one.evaluated_on("demo") == ["other"]
    assert list(one.datasets("pbmc")) == ["sim", "other"]


WRONG = {
    "tokens: {tokenizer: binned, binning: quantile_corpus}, objective: {name: masked_value}": (
        "runs.demo.tokens: its bins are fitted to the corpus; set vocabulary.quantiles or tokens.edges"
    ),
    "tokens: {truncation: variable}": (
        "runs.demo.tokens.truncation: variable requires vocabulary.variability; set it to yes"
    ),
    "trian: {}": "unknown key 'trian'; did you mean 'train'?",
    "zzz: {}": f"unknown key 'zzz'; there are: {', '.join(top_level())}",
    "train: {lrr: 1}": "train: unknown key 'lrr'; did you mean 'lr'?",
    "objective: {name: classification, label_colum: cell_type}": (
        "objective: unknown key 'label_colum'; did you mean 'label_column'?"
    ),
    "runs: {demo: {corpus: pbmc, train: {lrr: 1}}}": "runs.demo.train: unknown key 'lrr'; did you mean 'lr'?",
    "runs: {demo: {corpus: pbmc, trian: {}}}": "runs.demo: unknown key 'trian'; did you mean 'train'?",
    "train: {lr: -1}": "train.lr: input should be greater than 0, got -1",
    "train: {lr: fast}": "train.lr: input should be a valid number, unable to parse string as a number, got 'fast'",
    "train: {lr: true}": "train.lr: expected a number, got a boolean",
    "train: {clip_norm: true}": "train.clip_norm: expected a number, got a boolean",
    "evaluate: {folds: 9223372036854775808}": "evaluate.folds: expected an integer of 64 bits, got 9223372036854775808",
    "parallel: {sharding_strategy: ZeRO-2}": (
        "parallel.sharding_strategy: input should be 'FULL_SHARD', 'SHARD_GRAD_OP', 'HYBRID_SHARD' or 'NO_SHARD', "
        "got 'ZeRO-2'; ZeRO-2 is SHARD_GRAD_OP here"
    ),
    "train: {num_epochs: 3}": "train: unknown key 'num_epochs'; set train.epochs",
    "train: {optimizer: adam}": "train.optimizer: unknown optimizer 'adam'; did you mean 'adamw'?",
    "train: {epochs: null, steps: atuo}": (
        "train.steps: expected a number of steps from 1 to 1,000,000,000, auto or null, got 'atuo'"
    ),
    "train: {steps: true}": "train.steps: expected a number of steps from 1 to 1,000,000,000, auto or null, got True",
    "train: {steps: auto}": "train: expected one of steps and epochs, got both; set one of them, and the other to null",
    "train: {epochs: null}": (
        "train: expected one of steps and epochs, got neither; set one of them, and the other to null"
    ),
    "train: {epochs: .inf}": "train.epochs: input should be a finite number, got inf",
    "stream: {weight_by: cell_type, weight_start_exponent: 0.5}": (
        "stream: weight_start_exponent requires weight_warmup_steps, got 0; set both, or neither"
    ),
    "stream: {labelled_frac: 0.5}": (
        "runs.demo: stream.labelled_frac requires stream.weight_by, an obs column of labels; set both, or neither"
    ),
    "model: {family: foo}": "model: unknown family 'foo'; there are: " + ", ".join(BUILT_IN["family"]),
    "objective: {likelihood: nb, weights: counts}": (
        "objective: weights requires likelihood softmax, got nb; leave weights out"
    ),
    "objective: {variance_weight: 2}": (
        "objective: variance_weight requires view_loss vicreg, got null; leave variance_weight out"
    ),
    "objective: {batch_column: dataset, batch_adversary_scale: 2}": (
        "objective: batch_adversary_scale requires batch_adversary, got null; leave batch_adversary_scale out"
    ),
    "tokens: {covariates: [assay, assay]}": (
        "tokens: covariates: expected each value once, got assay twice; leave one out"
    ),
    "objective: {name: supervised_contrastive, label_column: cell_type}, tokens: {covariates: [cell_type]}": (
        "runs.demo: tokens.covariates: cell_type is also the label that the model is trained to predict; leave it out"
    ),
    "model: 3": "model: expected a mapping, got 3",
    "runs: {demo: {corpus: pbmc, tokens: 3}}": "runs.demo.tokens: expected a mapping with `tokenizer`, got 3",
    "evaluate: {tasks: {prbe: null}}": "evaluate.tasks: prbe: unknown task 'prbe'; did you mean 'probe'?",
    "evaluate: {tasks: {probe: {seed: 1}}}": "evaluate.tasks: probe: unknown key 'seed'; did you mean 'seeds'?",
    "evaluate: {tasks: {probe: 3}}": ("evaluate.tasks: probe: expected a name and a mapping of options, got 3"),
    "evaluate: {tasks: {probe: {name: transfer}}}": "evaluate.tasks: probe: name is 'transfer'; leave it out",
    "tokens: {tokenizer: rank}, objective: {name: masked_value}": (
        "runs.demo: objective masked_value needs values, rank has none; choose masked_gene"
    ),
    "train: {token_budget: 100}": (
        "runs.demo: tokens.max_tokens 2048 exceeds train.token_budget 100; lower max_tokens"
    ),
    "train: {global_batch: 17}": "runs.demo: train.global_batch: expected a multiple of stream.lanes 8, got 17; set 16",
    "shard: {val_frac: 0.6, test_frac: 0.5}": "shard: val_frac + test_frac = 1.1 leaves no cells for training",
    "runs: {demo: null}": "runs.demo.corpus: is missing",
    "runs: {demo: {corpus: lung}}": "runs.demo.corpus: no corpus 'lung'; there are: pbmc",
    "runs: {demo: {corpus: pbmc, init_from: big}}": (
        "runs.demo.init_from: no run 'big'; there are: demo; a folder has a `/`, such as ./NAME"
    ),
    "runs: {demo: {corpus: pbmc, init_from: 'geneformer:a{b}'}}": (
        "runs.demo.init_from: string should match pattern '^[^{}<>\\r\\n]+$', got 'geneformer:a{b}'"
    ),
    "vocabulary: {medians: 'scgpt:a{b}'}": (
        "vocabulary.medians: string should match pattern '^[^{}<>\\r\\n]+$', got 'scgpt:a{b}'"
    ),
    "runs: {a: {corpus: pbmc, init_from: b}, b: {corpus: pbmc, objective: {name: distill, teacher: a}}}": (
        "runs: init_from, trunk and objective.teacher are a circle: a -> b -> a"
    ),
    "objective: {name: sum, parts: {big: {name: distill, teacher: ./a}, deep: {name: distill, teacher: ./b}}}": (
        "objective: parts: big and deep both have a teacher, and the model is given one batch; keep one"
    ),
    "runs: {a/b: {corpus: pbmc}}": (
        "runs: 'a/b' is no name; use letters, digits, '_', '.' and '-', first a letter or digit"
    ),
    "runs: {demo.h5ad: {corpus: pbmc}}": "runs: demo.h5ad is the name of a file; set demo, without .h5ad",
    "evaluate: {datasets: [sim], tasks: {transfer: {fit_on: [sim], test_on: [nope]}}}": (
        "runs.demo.evaluate.tasks.transfer.test_on: 'nope' is not evaluated; name one of sim, or add it to "
        "evaluate.datasets"
    ),
    "bridges: {scib: python}": "bridges: no bridge 'scib'; did you mean 'scvi'?",
    "runs: null": "runs: expected a mapping with at least one name, got None",
    "runs: {demo: pbmc}": "runs.demo: expected a mapping, got 'pbmc'",
}
"""What a mistake in a section, as YAML, is answered with."""


@pytest.mark.parametrize("sections", WRONG)
def test_a_mistake_is_refused_in_one_line(config: Config, sections: str) -> None:
    assert config.refused(**yaml.safe_load(f"{{{sections}}}")) == f"config/config.yaml: {WRONG[sections]}"


PARENT = {"corpus": "pbmc", "model": {"hidden": 32, "heads": 2, "dropout": 0.1}}


def test_a_run_takes_model_and_tokens_of_the_one_it_starts_from_unless_it_sets_them(
    config: Config, tmp_path: Path
) -> None:
    tuned = {"corpus": "pbmc", "init_from": "big"}
    made = config(model={"hidden": 64, "dropout": 0.2}, runs={"tuned": tuned, "big": PARENT, "again": tuned})
    for name in ("tuned", "again"):
        model = made.runs[name].model.model_dump()
        assert (model["hidden"], model["heads"], model["dropout"]) == (32, 2, 0.1)
    fits = config(model={"hidden": 32, "heads": 2, "dropout": 0.2}, runs={"tuned": tuned, "big": PARENT})
    assert fits.runs["tuned"].model.model_dump()["dropout"] == 0.2  # as ever: the top suits the model
    own = config(runs={"tuned": tuned | {"model": {"dropout": 0.3}}, "big": PARENT}).runs["tuned"].model.model_dump()
    assert (own["hidden"], own["dropout"]) == (32, 0.3)
    binned = PARENT | {"tokens": {"tokenizer": "binned", "bins": 9}, "objective": {"name": "masked_value"}}
    masked = tuned | {"objective": {"name": "masked_value"}}
    assert config(runs={"tuned": masked, "big": binned}).runs["tuned"].tokens.model_dump()["bins"] == 9
    folder = tmp_path / "given"
    folder.mkdir()
    sections = {key: made.section("train", "big")[key] for key in ("model", "tokens")}
    (folder / "config.json").write_text(json.dumps(sections))
    assert config(runs={"tuned": tuned | {"init_from": str(folder)}}).runs["tuned"].model.model_dump()["hidden"] == 32


def test_a_model_that_cannot_be_the_one_it_starts_from_is_refused_before_training(
    config: Config, tmp_path: Path
) -> None:
    for tokenizer in ("continuous", "rank"):
        sections = {"model": {"hidden": 128}, "tokens": {"tokenizer": tokenizer}}
        (tmp_path / tokenizer).mkdir()
        (tmp_path / tokenizer / "config.json").write_text(json.dumps(sections))
    wide = {"corpus": "pbmc", "model": {"hidden": 64}}
    for parent, option, now, before in (
        ("big", "model.hidden", "64", "32"),
        (f"{tmp_path}/continuous", "model.hidden", "64", "128"),
        (f"{tmp_path}/rank", "tokens.tokenizer", "'continuous'", "'rank'"),
    ):
        own = wide if option == "model.hidden" else {"corpus": "pbmc", "tokens": {"tokenizer": "continuous"}}
        assert config.refused(runs={"tuned": own | {"init_from": parent}, "big": PARENT}) == (
            f"config/config.yaml: runs.tuned: {option} is {now}, the model to start from ({parent}) has {before}; make "
            "them equal"
        )


def test_an_unknown_dataset_is_named_with_the_known_ones(config: Config, table: Path) -> None:
    end = f"no dataset 'nope' in {table}; there are: sim, other"
    assert config.refused(evaluate={"datasets": ["nope"]}) == (
        f"config/config.yaml: runs.demo.evaluate.datasets: {end}"
    )
    corpora = {"pbmc": {"table": str(table), "datasets": ["nope"]}}
    assert config.refused(corpora=corpora) == f"config/config.yaml: corpora.pbmc.datasets: {end}"


@pytest.mark.parametrize("tree", [None, [], "text"])
def test_a_file_without_a_mapping_is_refused(tree: Any) -> None:
    with pytest.raises(ConfigError, match=r"^config/config\.yaml: expected a mapping of sections, got \w+$"):
        check_config(tree)


def test_a_file_that_is_missing_or_not_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    with refused(f"{path}: No such file or directory"):
        load_config(path)
    path.write_text("train: [1")
    with pytest.raises(ConfigError) as broken:
        load_config(path)
    assert str(broken.value).startswith(f"{path}: not valid YAML: ")
    assert "\n" not in str(broken.value)


ROOT = Path(__file__).resolve().parents[2]


def test_every_word_leads_to_an_option_that_the_documentation_has() -> None:
    text = (ROOT / "config" / "README.md").read_text(encoding="utf-8")
    for word, here in other_words("keys").items():
        assert "profile" in here or re.match(
            r"(train|stream|parallel|model|tokens|objective|finetune|shard)\.\w+", here
        ), word
        for section, key in re.findall(r"\b(train|stream|parallel|model|tokens|objective|finetune|shard)\.(\w+)", here):
            assert re.search(rf"`(?:{section}\.)?{key}`", text), f"{word}: no {section}.{key}"
    assert all(value in text for value in other_words("values").values())
