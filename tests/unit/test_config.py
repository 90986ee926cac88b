"""Configuration: defaults, overrides, words of other tools, and the one-line error for every
mistake.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cellmill.config import OPTIONS, Workflow, check_config, check_options, load_config
from cellmill.config.job_files import JobFiles
from cellmill.config.load import top_level
from cellmill.config.parts.tokens import Tokens
from cellmill.config.plugin import BUILT_IN
from cellmill.config.section import other_words
from cellmill.errors import ConfigError
from tests.checks import refused


@dataclasses.dataclass
class Config:
    """A small configuration; a call checks it with sections replaced or, if they are mappings,
    updated.
    """

    table: Path

    def __call__(self, **sections: Any) -> Workflow:
        tree: dict[str, Any] = {
            "corpora": {"pbmc": {"table": str(self.table)}},
            "train": {"epochs": 2, "global_batch": 16},
            "runs": {"demo": {"corpus": "pbmc"}},
        }
        for name, value in sections.items():
            both = isinstance(value, dict) and isinstance(tree.get(name), dict)
            tree[name] = tree[name] | value if both else value
        return check_config(tree)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "datasets.tsv"
    path.write_text("dataset\tpath\tlabel\nsim\traw.h5ad\tcell_type\nother\tother.h5ad\t\n")
    return Config(path)


def test_a_run_has_every_section_with_its_defaults(config: Config) -> None:
    run = config().runs["demo"]
    assert (run.train.epochs, run.train.steps, run.train.lr) == (2, None, 1e-3)
    assert (run.tokens.tokenizer, run.model.family, run.parallel.strategy) == (
        "continuous",
        "encoder",
        "fsdp",
    )
    assert run.model.model_dump() == run.model.model_dump(mode="json")
    assert config(model=None, report=None).runs["demo"].model == run.model
    with pytest.raises(ValueError, match="frozen"):
        run.train.lr = 1.0  # type: ignore[misc]


def test_a_run_overrides_single_keys_of_a_default_section(config: Config) -> None:
    pipeline = config(
        model={"hidden": 64, "layers": 2},
        runs={
            "demo": {"corpus": "pbmc"},
            "deep": {"corpus": "pbmc", "model": {"layers": 9}, "train": {"lr": 0.5}},
        },
    )
    plain = pipeline.runs["demo"]
    deep = pipeline.runs["deep"]
    assert deep.model.model_dump() == plain.model.model_dump() | {"layers": 9}
    assert deep.train.model_dump() == plain.train.model_dump() | {"lr": 0.5}
    train = config(runs={"demo": {"corpus": "pbmc", "train": {"steps": "auto"}}}).runs["demo"].train
    assert (train.steps, train.epochs) == ("auto", None), "a length replaces the default length"


def test_another_tokenizer_keeps_the_shared_options(
    config: Config,
) -> None:
    rank = {"tokens": {"tokenizer": "rank"}, "objective": {"name": "masked_gene"}}
    same = {"tokens": {"tokenizer": "binned", "max_tokens": 99}}
    tree = {
        "runs": {
            name: {"corpus": "pbmc"} | run
            for name, run in (("plain", {}), ("rank", rank), ("same", same))
        }
    }
    runs = config(tokens={"tokenizer": "binned", "bins": 10, "max_tokens": 100}, **tree).runs
    keys = {"tokenizer", "max_tokens", "bins"}
    assert {
        name: runs[name].tokens.model_dump(include=keys) for name in ("plain", "rank", "same")
    } == {
        "plain": {"tokenizer": "binned", "max_tokens": 100, "bins": 10},
        "rank": {"tokenizer": "rank", "max_tokens": 100},
        "same": {"tokenizer": "binned", "max_tokens": 99, "bins": 10},
    }


def test_a_corpus_overrides_defaults_of_only_itself(config: Config) -> None:
    mouse = {"table": str(config.table), "preprocess": {"organism": "mouse"}}
    # YAML loads 3e-4 as text
    corpora = config(preprocess={"min_genes": "9"}, corpora={"mouse": mouse}).corpora
    found = {
        name: (corpus.preprocess.organism, corpus.preprocess.min_genes)
        for name, corpus in corpora.items()
    }
    assert found == {"pbmc": ("human", 9), "mouse": ("mouse", 9)}


@pytest.mark.parametrize("stage", OPTIONS)
def test_a_stage_reads_its_sections_back_from_json(config: Config, stage: str) -> None:
    pipeline = config()
    name = (
        "pbmc" if stage in ("preprocess", "vocabulary", "divide", "shard_part", "shard") else "demo"
    )
    sections = json.loads(json.dumps(pipeline.section(stage, name)))
    assert set(sections) == set(OPTIONS[stage].model_fields)
    options = check_options(OPTIONS[stage], sections, "--options")
    assert options.model_dump(mode="json") == sections


def test_a_corpus_lists_its_datasets_in_table_order(
    config: Config,
) -> None:
    def named(*datasets: str) -> dict[str, Any]:
        return {"pbmc": {"table": str(config.table), "datasets": datasets}}

    assert config().trained_on("pbmc") == config().evaluated_on("demo") == ["sim", "other"]
    assert config(evaluate={"datasets": ["other"]}).evaluated_on("demo") == ["other"]
    assert config(corpora=named("other", "sim")).trained_on("pbmc") == ["sim", "other"]
    one = config(corpora=named("other"))
    assert one.trained_on("pbmc") == one.evaluated_on("demo") == ["other"]
    assert list(one.datasets("pbmc")) == ["sim", "other"]
    assert one.datasets("pbmc") is one.datasets("pbmc")  # read once


STAGES = (
    "runs.demo: parallel.pp {} with schedule {} has {} pipeline stages for model.layers {}, and each needs a block; "
    "use {}"
)
WRONG = {
    "tokens: {tokenizer: binned, binning: quantile_corpus}, objective: {name: masked_value}": (
        "runs.demo.tokens: its bins are fitted to the corpus; set vocabulary.quantiles or tokens.edges"
    ),
    "tokens: {truncation: variable}": (
        "runs.demo.tokens.truncation: variable requires vocabulary.variability; set it to yes"
    ),
    "trian: {}": "unknown key 'trian'; did you mean 'train'?",
    "zzz: {}": f"unknown key 'zzz'; there are: {', '.join(top_level())}",
    "corpora: {pbmc: {datasets: []}}": "corpora.pbmc.datasets: expected names of datasets, got none; null takes all",
    "lr: 1": "unknown key 'lr'; it is an option of train",
    "runs: {demo: {corpus: pbmc, stream: {max_mito_frac: 1}}}": (
        "runs.demo.stream: unknown key 'max_mito_frac'; it is an option of preprocess"
    ),
    "train: {lrr: 1}": "train: unknown key 'lrr'; did you mean 'lr'?",
    "objective: {name: classification, label_colum: cell_type}": (
        "objective: unknown key 'label_colum'; did you mean 'label_column'?"
    ),
    "runs: {demo: {corpus: pbmc, train: {lrr: 1}}}": "runs.demo.train: unknown key 'lrr'; did you mean 'lr'?",
    "runs: {demo: {corpus: pbmc, trian: {}}}": "runs.demo: unknown key 'trian'; did you mean 'train'?",
    "train: {lr: -1}": "train.lr: input should be greater than 0, got -1",
    "train: {lr: fast}": "train.lr: input should be a valid number, unable to parse string as a number, got 'fast'",
    "train: {lr: true}": "train.lr: expected a number, got a boolean",
    "evaluate: {tasks: {few_shot: {shots: [5, true]}}}": "evaluate.tasks: few_shot: shots: expected a list of "
    "numbers or words, got a boolean in it",
    "evaluate: {tasks: {few_shot: {shots: 5}}}": "evaluate.tasks: few_shot: shots: input should be a valid list, got "
    "5; write [5]",
    "evaluate: {tasks: {transfer: {}}}": "evaluate.tasks: transfer: fit_on: is missing (Datasets to fit the "
    "classifiers on)",
    "evaluate: {tasks: {low_depth: {count_fracs: [0.1, 0.10000001]}}}": "evaluate.tasks: low_depth: count_fracs: "
    "expected fractions that differ in 6 digits, got [0.1, 0.10000001]; leave one out",
    "evaluate: {tasks: {low_depth: {repeats: 1001}}}": "evaluate.tasks: low_depth: repeats: input should be less than "
    "or equal to 1000, got 1001",
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
    "stream: {weight_by: cell_type, weight_start_exponent: 0.5}": (
        "stream: weight_start_exponent requires weight_warmup_steps, got 0; set both, or neither"
    ),
    "stream: {labelled_frac: 0.5}": (
        "runs.demo: stream.labelled_frac requires stream.weight_by, an obs column of labels; set both, or neither"
    ),
    "model: {family: foo}": "model: unknown family 'foo'; there are: "
    + ", ".join(BUILT_IN["family"]),
    "objective: {likelihood: nb, weights: counts}": (
        "objective: weights requires likelihood softmax, got nb; leave weights out"
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
    "evaluate: {tasks: {probe: 3}}": (
        "evaluate.tasks: probe: expected a name and a mapping of options, got 3"
    ),
    "evaluate: {tasks: {probe: {name: transfer}}}": "evaluate.tasks: probe: name is 'transfer'; leave it out",
    "tokens: {tokenizer: rank}, objective: {name: masked_value}": (
        "runs.demo: objective masked_value needs values that measure expression, got places; use objective masked_gene"
    ),
    "train: {token_budget: 100}": (
        "runs.demo: tokens.max_tokens 2048 exceeds train.token_budget 100; lower max_tokens"
    ),
    "train: {global_batch: 17}": "runs.demo: train.global_batch: expected a multiple of stream.lanes 8, got 17; set 16",
    "model: {heads: 6, hidden: 48}, parallel: {tp: 4}": (
        "runs.demo: parallel.tp 4 does not divide model.heads 6; use 3"
    ),
    "model: {ffn_hidden: 63}, parallel: {tp: 2}": (
        "runs.demo: parallel.tp 2 does not divide model.ffn_hidden 63; use 1"
    ),
    "parallel: {sequence_parallel: yes}": (
        "runs.demo: parallel.sequence_parallel requires parallel.tp > 1; set tp, or leave it out"
    ),
    "model: {layers: 6}, parallel: {pp: 4, schedule: ZBV}": STAGES.format(4, "ZBV", 8, 6, "pp 3"),
    "model: {layers: 3}, parallel: {pp: 2, schedule: DualPipeV}": STAGES.format(
        2, "DualPipeV", 4, 3, "1F1B, or pp 1"
    ),
    "parallel: {schedule: ZBV}": "runs.demo: parallel.schedule requires parallel.pp > 1; set pp, or leave schedule out",
    "parallel: {microbatches: 8}": (
        "runs.demo: parallel.microbatches requires parallel.pp > 1; set pp, or leave microbatches out"
    ),
    "parallel: {cpu_offload: full, strategy: ddp}": (
        "runs.demo: parallel.cpu_offload full requires strategy fsdp, got ddp; set fsdp, or cpu_offload to optimizer"
    ),
    "parallel: {compile: yes, activation_checkpointing: selective}": (
        "runs.demo: parallel.activation_checkpointing selective has no effect with compile; set it to null or full"
    ),
    "parallel: {compile: yes, pp: 2, schedule: ZBV}": (
        "runs.demo: parallel.schedule ZBV splits the backward pass, which compile fuses; set compile to no"
    ),
    "shard: {val_frac: 0.6, test_frac: 0.5}": "shard: val_frac + test_frac = 1.1 leaves no cells for training",
    "shard: {val_frac: 0.1, test_frac: 0.9}": "shard: val_frac + test_frac = 1 leaves no cells for training",
    "runs: {demo: null}": "runs.demo.corpus: is missing",
    "runs: {demo: {corpus: lung}}": "runs.demo.corpus: no corpus 'lung'; there are: pbmc",
    "train: {best_metric: effective_rank}": (
        "runs.demo: train.best_metric effective_rank: larger is better; set train.best_mode to max"
    ),
    "train: {best_metric: val_loss, best_mode: max}": (
        "runs.demo: train.best_metric val_loss: smaller is better; set train.best_mode to min"
    ),
    "train: {steps: 9, epochs: null, keep_steps: [12]}, runs: {demo: {corpus: pbmc, evaluate_steps: [12]}}": (
        "runs.demo: evaluate_steps: 12 is after the last step; remove it, or raise train.steps (9)"
    ),
    "runs: {demo: {corpus: pbmc, init_from: big}}": (
        "runs.demo.init_from: no run 'big'; there are: demo; a folder has a `/`, such as ./NAME"
    ),
    "runs: {demo: {corpus: pbmc, init_from: 'geneformer:a{b}'}}": (
        "runs.demo.init_from: string should match pattern '^[^{}<>\\r\\n]+$', got 'geneformer:a{b}'"
    ),
    "runs: {a: {corpus: pbmc, init_from: b}, b: {corpus: pbmc, objective: {name: distill, teacher: a}}}": (
        "runs: init_from, trunk and objective.teacher are a circle: a -> b -> a"
    ),
    "objective: {name: sum, parts: {big: {name: distill, teacher: ./a}, deep: {name: distill, teacher: ./b}}}": (
        "objective: parts: big and deep have a teacher, and a batch carries the vectors of one teacher; keep one"
    ),
    "runs: {a/b: {corpus: pbmc}}": (
        "runs: 'a/b' is no name; use letters, digits, '_', '.' and '-', first a letter or digit"
    ),
    "runs: {demo.h5ad: {corpus: pbmc}}": "runs: demo.h5ad is the name of a file; set demo, without .h5ad",
    "bridges: {scib: python}": "bridges: no bridge 'scib'; did you mean 'scvi'?",
    "runs: null": "runs: expected a mapping with at least one name, got None",
    "runs: {demo: pbmc}": "runs.demo: expected a mapping, got 'pbmc'",
}
"""What a mistake in a section, as YAML, is answered with."""


def refusal(config: Config, sections: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    return str(caught.value).removeprefix("config/config.yaml: ")


@pytest.mark.parametrize("sections", WRONG)
def test_a_mistake_is_refused_in_one_line(config: Config, sections: str) -> None:
    assert refusal(config, yaml.safe_load(f"{{{sections}}}")) == WRONG[sections]


def test_levels_beyond_the_keys_of_draws_are_refused(config: Config) -> None:
    tasks = {"missing_genes": {"genes": [*range(1, 102)]}}
    assert "list should have at most 100 items" in refusal(config, {"evaluate": {"tasks": tasks}})


PARENT = {"corpus": "pbmc", "model": {"hidden": 32, "heads": 2, "dropout": 0.1}}


TUNED = {"corpus": "pbmc", "init_from": "big"}


def test_a_run_takes_model_and_tokens_from_its_start(config: Config, tmp_path: Path) -> None:
    def model(
        top: dict[str, Any], run: dict[str, Any] = TUNED, name: str = "tuned"
    ) -> tuple[Any, ...]:
        tuned = config(model=top, runs={"tuned": run, "big": PARENT, "again": run}).runs[name]
        return tuple(tuned.model.model_dump()[key] for key in ("hidden", "heads", "dropout"))

    other = {"hidden": 64, "dropout": 0.2}
    suiting = {"hidden": 32, "heads": 2, "dropout": 0.2}
    assert model(other) == model(other, name="again") == (32, 2, 0.1)
    assert model(suiting) == (32, 2, 0.2), "the top suits the model"
    assert model({}, TUNED | {"model": {"dropout": 0.3}}) == (32, 2, 0.3)
    binned = PARENT | {
        "tokens": {"tokenizer": "binned", "bins": 9},
        "objective": {"name": "masked_value"},
    }
    masked = TUNED | {"objective": {"name": "masked_value"}}
    assert (
        config(runs={"tuned": masked, "big": binned}).runs["tuned"].tokens.model_dump()["bins"] == 9
    )
    sections = config(runs={"big": PARENT}).section("train", "big")
    (tmp_path / "config.json").write_text(
        json.dumps({key: sections[key] for key in ("model", "tokens")})
    )
    assert model(other, TUNED | {"init_from": str(tmp_path)}) == (32, 2, 0.1)


THIN = {"hidden": 36, "heads": 4, "dropout": 0.1}


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("source", "top", "own", "expected"),
    [
        ({"pooling": "attention"}, {}, {}, {"pooling": "attention"}),
        ({"gene_vector_dim": 32}, {"dropout": 0.2}, {}, {"gene_vector_dim": 32, "dropout": 0.2}),
        ({"hidden": 512}, {"dropout": 0.2}, {}, {"hidden": 512, "dropout": 0.2}),
        (THIN, {"hidden": 300, "heads": 3, "dropout": 0.2}, {}, THIN),
        (THIN, {"heads": 8, "dropout": 0.2}, {}, THIN),
        ({"pooling": "cls"}, {"pooling": "mean"}, {}, {"pooling": "mean"}),
        ({"pooling": "cls"}, {"dropout": 0.2}, {"pooling": "mean"}, {"pooling": "mean"}),
        ({"size": "10M"}, {}, {"dropout": 0.2}, {"layers": 6, "dropout": 0.2}),
        ({"family": "scgpt", "ends": "cls", "cls_value": -2}, {}, {}, {"cls_value": -2}),
    ],
)
def test_keys_that_nobody_wrote_are_those_of_the_start(
    config: Config,
    tmp_path: Path,
    stored: bool,
    source: dict[str, Any],
    top: dict[str, Any],
    own: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    scgpt = {"tokens": {"tokenizer": "binned"}, "objective": {"name": "masked_gene"}}
    others = scgpt if "family" in source else {"objective": {"name": "cell_decoding"}}
    big = {"corpus": "pbmc", "model": source} | others
    tuned = {"corpus": "pbmc", "init_from": "big", "model": own}
    if stored:
        sections = config(runs={"big": big}).section("train", "big")
        (tmp_path / "config.json").write_text(json.dumps(sections))
        tuned["init_from"] = str(tmp_path)
    tuned["objective"] = others["objective"]
    runs = {"demo": tuned} if stored else {"demo": tuned, "big": big}
    model = config(model=top, runs=runs).runs["demo"].model.model_dump()
    assert {key: model[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("top", "own", "expected"),
    [
        ({}, {}, {"max_tokens": 99, "zero_frac": 0.5, "edges": [1.0, 2.0]}),
        ({"max_tokens": 50}, {}, {"max_tokens": 50, "zero_frac": 0.5}),
        ({"tokenizer": "rank", "max_tokens": 50}, {}, {"max_tokens": 99, "bins": 3}),
        ({"binning": "uniform"}, {}, {"max_tokens": 99, "edges": None}),
        ({}, {"covariates": []}, {"covariates": [], "truncation": "random"}),
    ],
)
def test_tokens_that_nobody_wrote_are_those_of_the_start(
    config: Config, tmp_path: Path, top: dict[str, Any], own: dict[str, Any], expected: Any
) -> None:
    written = {
        "tokenizer": "binned",
        "bins": 3,
        "binning": "quantile_corpus",
        "edges": [1.0, 2.0],
        "max_tokens": 99,
        "truncation": "random",
        "zero_frac": 0.5,
        "covariates": ["batch"],
    }
    tokens = Tokens.model_validate(written).model_dump(mode="json")
    (tmp_path / "config.json").write_text(json.dumps({"model": {}, "tokens": tokens}))
    run = {"corpus": "pbmc", "init_from": str(tmp_path), "tokens": own}
    run["objective"] = {"name": "masked_value"}
    tuned = config(tokens=top, runs={"demo": run}).runs["demo"].tokens.model_dump()
    expected = {"covariates": ["batch"]} | expected
    assert {key: tuned[key] for key in expected} == expected


@pytest.mark.parametrize("stored", [False, True])
def test_an_objective_without_zeros_takes_none_from_the_start(
    config: Config, tmp_path: Path, stored: bool
) -> None:
    tokens = {"zero_frac": 0.3, "max_tokens": 99}
    big = {"corpus": "pbmc", "tokens": tokens, "objective": {"name": "masked_value"}}
    labels = {"name": "classification", "label_column": "kind"}
    parent = "big"
    if stored:
        parent = str(tmp_path)
        sections = config(runs={"big": big}).section("train", "big")
        (tmp_path / "config.json").write_text(json.dumps(sections))
    runs = {"demo": TUNED | {"init_from": parent, "objective": labels}, "big": big}
    found = config(runs=runs).runs["demo"].tokens
    assert (found.zero_frac, found.max_tokens) == (0.0, 99)
    own = runs["demo"] | {"tokens": {"zero_frac": 0.2}}
    assert refusal(config, {"runs": runs | {"demo": own}}) == (
        "runs.demo: tokens.zero_frac: objective classification has no use for genes without counts; set it to 0"
    )


@pytest.mark.parametrize(
    ("tokenizer", "own", "problem"),
    [
        (
            None,
            {"model": {"hidden": 64}},
            "model.hidden is 64, the model to start from ({}) has 32",
        ),
        (
            "continuous",
            {"model": {"hidden": 64}},
            "model.hidden is 64, the model to start from ({}) has 128",
        ),
        (
            *("rank", {"tokens": {"max_tokens": 1000}, "objective": {"name": "masked_gene"}}),
            "tokens.max_tokens is 1000, the model to start from ({}) has 2048",
        ),
        (
            *("rank", {"tokens": {"tokenizer": "continuous"}}),
            "tokens.tokenizer is 'continuous', the model to start from ({}) has 'rank'",
        ),
    ],
)
def test_an_incompatible_start_is_refused_before_training(
    config: Config, tmp_path: Path, tokenizer: str | None, own: dict[str, Any], problem: str
) -> None:
    stored = {"model": {"hidden": 128}, "tokens": {"tokenizer": tokenizer}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    parent = "big" if tokenizer is None else str(tmp_path)
    message = refusal(
        config, {"runs": {"tuned": TUNED | own | {"init_from": parent}, "big": PARENT}}
    )
    assert message == f"runs.tuned: {problem.format(parent)}; make them equal"


def test_a_dry_run_points_a_changed_training_to_check(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    class OfRun(dict[str, str]):
        at = ""

    monkeypatch.chdir(tmp_path)
    JobFiles(config(), lambda: True).options("train")(OfRun(run="demo"))
    changed = config(train={"lr": 5e-4})
    JobFiles(changed, lambda: False).options("train")(OfRun(run="demo"))
    assert capsys.readouterr().err == (
        "cellmill: train of demo: train.lr 0.001 -> 0.0005; `cellmill check` says whether the training refuses this\n"
    )


def test_an_unknown_dataset_is_named_with_the_valid_names(config: Config) -> None:
    end = f"no dataset 'nope' in {config.table}; there are: sim, other"
    assert (
        refusal(config, {"evaluate": {"datasets": ["nope"]}})
        == f"runs.demo.evaluate.datasets: {end}"
    )
    corpora = {"pbmc": {"table": str(config.table), "datasets": ["nope"]}}
    assert refusal(config, {"corpora": corpora}) == f"corpora.pbmc.datasets: {end}"


@pytest.mark.parametrize(
    ("tree", "given"), [(None, "an empty file"), ([], "list"), ("text", "str")]
)
def test_a_file_without_a_mapping_is_refused(tree: Any, given: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^config/config\.yaml: expected a mapping of sections, got {given}$"
    ):
        check_config(tree)


def test_a_text_option_says_what_it_expects(config: Config) -> None:
    assert refusal(config, {"vocabulary": {"genes": []}}) == (
        "vocabulary.genes: input should be a valid string, got []; expected file with one Ensembl id or current symbol "
        "per line"
    )


def test_a_file_that_is_missing_or_not_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    with refused(f"{path}: No such file or directory"):
        load_config(path)
    path.write_text("train: [1")
    with pytest.raises(ConfigError) as broken:
        load_config(path)
    assert str(broken.value).startswith(f"{path}: not valid YAML: ")
    assert "got '<stream end>' at line 1, column 10: train: [1" in str(broken.value)
    assert "\n" not in str(broken.value)


def test_every_search_word_leads_to_a_documented_option() -> None:
    text = (Path(__file__).resolve().parents[2] / "config" / "README.md").read_text(
        encoding="utf-8"
    )
    for word, here in other_words("keys").items():
        named = re.findall(
            r"\b(train|stream|parallel|model|tokens|objective|finetune|shard)\.(\w+)", here
        )
        assert named or "profile" in here, word
        for section, key in named:
            assert re.search(rf"`(?:{section}\.)?{key}`", text), f"{word}: no {section}.{key}"
    assert all(value in text for value in other_words("values").values())
