"""Sizes measured on the meta device equal those of the model; sizes by name."""

import gc
import re
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import _VersionWrapper

from cellmill.config.load import check_config, check_options
from cellmill.config.parts.family import SIZES, FamilyConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.data.rows import SparseCounts
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.tokenizer import tokenize_to_batch
from cellmill.models.batch import to_tensors
from cellmill.models.build import ModelSpec, build
from cellmill.models.families.encoder import EncoderModel
from cellmill.models.family import Model
from cellmill.models.initial import zeros
from cellmill.parallel.apply import checkpoint_activations
from cellmill.planner.measure import size as size_module
from cellmill.planner.measure.load import Load, Rates
from cellmill.planner.measure.passes import measure_passes
from cellmill.planner.measure.size import measure_size
from cellmill.planner.measure.workspace import _fit_equivalent_tokens
from cellmill.runs.identity import identity
from tests.checks import refused
from tests.house.documents import documentation
from tests.models import model_on_cpu, spec, train_options

HIDDEN = 64
LAYERS = 3
N_GENES = 60
KINDS = [
    ("continuous", "masked_value"),
    ("continuous", "masked_gene"),
    ("binned", "masked_value"),
    ("binned", "masked_gene"),
    ("rank", "masked_gene"),
    ("continuous", "cell_decoding"),
]
RECOMPUTED = [None, "full", "selective"]


def _spec(
    tokenizer: str = "continuous", objective: str = "masked_value", **options: Any
) -> ModelSpec:
    given = {"hidden": HIDDEN, "layers": LAYERS, "heads": 2, "objective": objective} | options
    return spec(N_GENES, Tokens.model_validate({"tokenizer": tokenizer, "max_tokens": 32}), **given)


def test_frozen_parameters_are_counted_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = measure_size(_spec())
    begin = EncoderModel.__init__

    def partly_frozen(model: Any, *given: Any) -> None:
        begin(model, *given)
        model.gene_embedding.requires_grad_(False)
        model.blocks[0].register_buffer("table", torch.empty(7, 3))
        model.blocks[0].initial_value = {"table": zeros}.get

    monkeypatch.setattr(EncoderModel, "__init__", partly_frozen)
    monkeypatch.setattr(size_module, "_SIZES", {})
    size = measure_size(_spec())
    frozen = (N_GENES + 2) * HIDDEN
    assert size.parameters == plain.parameters
    assert (size.begin.trained, plain.begin.trained) == (
        plain.begin.parameters - frozen,
        plain.begin.parameters,
    )
    assert (size.buffers, plain.buffers) == (21, 0)


def test_a_token_of_a_covariate_counts_like_one_of_a_gene() -> None:
    tokens = {"max_tokens": 8, "covariates": ["donor", "assay"]}
    levels = {"assay": ("x", "y"), "donor": ("a", "b")}
    given = {"hidden": HIDDEN, "layers": LAYERS, "heads": 2, "objective": "masked_gene"}
    size = measure_size(spec(N_GENES, Tokens.model_validate(tokens), levels, **given))
    plain = measure_size(_spec(objective="masked_gene"))
    assert size.block_input.per_token == plain.block_input.per_token == HIDDEN
    assert size.flops.block_per_token == pytest.approx(plain.flops.block_per_token)
    assert size.block.activations.per_token == pytest.approx(
        plain.block.activations.per_token, rel=0.05
    )


def test_flops_of_a_block_count_matrices_and_attention() -> None:
    size = measure_size(_spec())
    # forward and backward are 6 FLOPs per weight and token: qkv, out, up and down have 12 H^2
    # weights
    assert size.flops.block_per_token == pytest.approx(6 * 12 * HIDDEN**2)
    # two products of H multiply-adds for each query and key
    assert size.flops.block_per_pair == pytest.approx(3 * 4 * HIDDEN)


def test_flops_of_a_step_follow_the_published_formula() -> None:
    cells = 4
    length = 500
    genes = 1000
    given = {
        "hidden": HIDDEN,
        "layers": LAYERS,
        "heads": 4,
        "mask_frac": 0.15,
        "cell_loss_weight": 0,
    }
    size = measure_size(
        spec(genes, Tokens.model_validate({"tokenizer": "rank"}), objective="masked_gene", **given)
    )
    tokens = cells * length
    measured = size.flops.count(Load(tokens, cells * length**2, 0))
    encoder = (24 * tokens * HIDDEN**2 + 4 * cells * length**2 * HIDDEN) * 3 * LAYERS
    head = 0.15 * (6 * tokens * HIDDEN * (genes + 2) + 6 * tokens * HIDDEN**2)
    # the measured batch masks nearly 15 %
    assert measured == pytest.approx(encoder + head, rel=0.02)


@pytest.mark.parametrize(
    ("tokenizer", "objective", "options", "recompute"),
    [
        pytest.param(*kind, how, marks=() if how == RECOMPUTED[at % 3] else pytest.mark.full)
        for at, kind in enumerate(
            [
                *((*kind, {}) for kind in KINDS[:-1]),
                # with 0.99, 20 cells show too far from the mean
                (*KINDS[-1], {"max_hidden_frac": 0.8}),
                (*KINDS[0], {"dropout": 0.1}),
                (*KINDS[1], {"cell_loss_weight": 0}),
            ]
        )
        for how in RECOMPUTED
    ],
)
def test_activations_equal_those_that_autograd_keeps(
    tokenizer: str,
    objective: str,
    recompute: Literal["full", "selective"] | None,
    options: dict[str, float],
) -> None:
    given = _spec(tokenizer, objective, **options)
    size = measure_size(given)
    per_block = {
        None: size.block.activations,
        "full": size.block_input,
        "selective": size.selective_activations,
    }
    model = build(given).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    if recompute is not None:
        checkpoint_activations(model, "blocks", recompute)
    few, many = (_kept(model, _batch(given, cells), recompute) for cells in (20, 120))
    # what does not grow with the tokens is counted as workspace
    measured = (many[0] - few[0]) / (many[1] - few[1])
    load = Load(1, pairs=0, cells=120 / many[1])  # a token, and its share of a cell
    expected = LAYERS * per_block[recompute].total(load)
    expected += size.begin.activations.total(load) + size.finish.activations.total(load)
    assert measured == pytest.approx(expected, rel=0.06)
    assert few[0] - measured * few[1] <= size.finish_workspace.estimate(
        Load(few[1], pairs=0, cells=20)
    )


@pytest.mark.parametrize("tokens", [32, 128])
def test_a_small_micro_batch_needs_the_gradient_of_the_table(tokens: int) -> None:
    given = spec(5000, Tokens.model_validate({"max_tokens": 32}), objective="masked_gene")
    size = measure_size(given)
    with size_module._prepare(given, None) as (fitted, method):
        model = size_module._build(fitted, method, one_block=True)
        measured = measure_passes(model, fitted, tokens).finish
    planned = size.finish_workspace.estimate(Load(tokens, pairs=0, cells=tokens / 32))
    assert measured.kept + measured.workspace <= 1.01 * planned + size.finish.activations.total(
        Load(tokens, pairs=0, cells=tokens / 32)
    )


@pytest.mark.parametrize(
    ("short", "long", "equivalent"),
    [
        ([10.0, 20.0], [10.0, 20.0, 40.0], Rates(1.0, 0.0)),  # grows with tokens
        ([20.0, 40.0], [10.0, 20.0, 40.0], Rates(0.0, 32.0)),  # grows with cells
        ([15.0, 30.0], [10.0, 20.0, 40.0], Rates(0.5, 16.0)),
        ([11.0, 11.0], [10.0, 10.0, 10.0], Rates(0.0, 32.0)),  # with neither, as far as seen
    ],
)
def test_equivalent_tokens_follow_the_workspace_of_short_cells(
    short: list[float], long: list[float], equivalent: Rates
) -> None:
    tokens = (64.0, 128.0, 256.0)
    assert equivalent == _fit_equivalent_tokens(
        tuple(zip(tokens, long)), list(zip(tokens, short)), long_cell_tokens=32
    )


@pytest.mark.parametrize("recompute", [None, "selective"])
def test_a_block_keeps_nothing_that_does_not_grow_with_tokens(recompute: str | None) -> None:
    # weights that autograd keeps are no activations
    given = _spec()
    elements = []
    for tokens in (4096, 65536):
        with size_module._prepare(given, None) as (fitted, method):
            model = size_module._build(fitted, method, one_block=True)
            if recompute == "selective":
                checkpoint_activations(model, model.plan.blocks, recompute)
            measured = measure_passes(model, fitted, tokens)
        elements.append(measured.block.kept)
        assert measured.load.tokens == tokens
    assert elements[1] == pytest.approx(16 * elements[0], abs=100)


def _kept(model: Model, batch: Batch, recompute: str | None) -> tuple[float, int]:
    """Elements that autograd keeps for the backward pass of a batch, and its tokens."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    # alive, or an address would be counted once for two tensors
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(model.prepare(model.view(to_tensors(batch), seed=0, step=0), seed=0, step=0))
    if recompute == "selective":  # it keeps tensors in a cache of its own
        for tensor in (value.val for value in gc.get_objects() if type(value) is _VersionWrapper):
            keep(tensor)
    elements = sum(storage.nbytes() for storage in kept.values()) / 4
    loss.backward()
    return elements, len(batch.token_ids)


def _batch(given: ModelSpec, cells: int) -> Batch:
    """Random cells of 60 tokens, as many as the planner's have: what a cell keeps is counted by its
    tokens.
    """
    rng = np.random.default_rng(0)
    genes = np.concatenate([rng.permutation(N_GENES) for _ in range(cells)]).astype(np.int32)
    counts = rng.integers(1, 50, len(genes), dtype=np.uint32)
    tokenizer = given.tokens.load()(given.tokens)
    counted = SparseCounts(np.arange(cells + 1) * N_GENES, genes, counts)
    return tokenize_to_batch(tokenizer, counted, np.arange(cells), True)


def test_tensor_parallel_reduces_four_times_per_block() -> None:
    whole = measure_size(_spec())
    cut = measure_size(_spec(), tp=2)
    # replicated: norms, biases of out and down
    matrices = 12 * HIDDEN**2
    biases = 7 * HIDDEN
    replicated = 6 * HIDDEN
    assert whole.block.parameters == matrices + biases + replicated
    assert cut.block.parameters == (matrices + biases) / 2 + replicated
    assert cut.flops.block_per_token == pytest.approx(whole.flops.block_per_token / 2)
    assert cut.flops.block_per_pair == pytest.approx(whole.flops.block_per_pair / 2)
    # Megatron-LM: two all-reduces of (T, H) in the forward and two in the backward pass
    assert cut.block.collective_elements.per_token == 2 * HIDDEN
    assert cut.block.collectives == 2
    assert (
        cut.begin.collective_elements.per_token == HIDDEN
    )  # the embedding, whose vocabulary is cut
    assert (
        whole.block.collective_elements.per_token == whole.begin.collective_elements.per_token == 0
    )
    sequence = measure_size(_spec(), tp=2, sequence_parallel=True)
    assert (
        sequence.block.activations.per_token
        < cut.block.activations.per_token
        < whole.block.activations.per_token
    )
    assert not dist.is_initialized()


@pytest.mark.full
def test_measuring_twice_gives_equal_sizes() -> None:
    given = _spec(layers=1)
    layouts: list[dict[str, Any]] = [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}]
    first = [measure_size(given, **layout) for layout in layouts]
    size_module._SIZES.clear()
    assert [measure_size(given, **layout) for layout in reversed(layouts)] == first[::-1]


def test_a_module_without_an_initial_value_is_named() -> None:
    with refused(
        "no initial value for blocks.0.gate.weight of PReLU; define initial_value(name) on it",
        TypeError,
    ):
        build(_spec(), lambda model: model.blocks[0].register_module("gate", nn.PReLU()))


PARTS: dict[str, Any] = {
    "cell_decoding": {"likelihood": "nb"},
    "masked_value": {"weight": 0.3, "renormalize": True},
}


def test_a_sum_with_a_learned_pooling_is_measured() -> None:
    given: Any = {
        "hidden": 16,
        "layers": 1,
        "heads": 2,
        "objective": "sum",
        "parts": PARTS,
        "pooling": "attention",
    }
    whole = measure_size(spec(120, **given))
    half = measure_size(spec(120, **given), 2, sequence_parallel=True)
    assert whole.parameters == sum(p.numel() for p in model_on_cpu(120, **given).parameters())
    assert half.parameters < whole.parameters
    assert half.finish_workspace.estimate(Load(4096, pairs=0, cells=64)) > 0


@pytest.mark.parametrize(
    ("objective", "passes"),
    [
        ({"objective": "masked_gene"}, (1, 1)),
        ({"objective": "supervised_contrastive", "label_column": "kind"}, (2, 2)),
        ({"objective": "cell_decoding", "view_loss": "vicreg"}, (2, 1)),
    ],
    ids=str,
)
def test_a_coupled_loss_is_another_pass_where_it_is_computed(
    objective: dict[str, Any], passes: tuple[int, int]
) -> None:
    flops = measure_size(
        spec(60, levels={"kind": ("a", "b")}, hidden=16, layers=1, heads=2, **objective)
    ).flops
    assert (flops.forward_passes, flops.validation_passes) == passes


@pytest.mark.parametrize(("layers", "vector_dim"), [(1, None), (2, None), (1, 48)])
def test_flops_of_profile_models_are_independent_of_tokens(
    layers: int, vector_dim: int | None
) -> None:
    hidden = 32
    genes = 300
    size = measure_size(
        spec(
            genes,
            family="profile",
            hidden=hidden,
            layers=layers,
            objective="cell_decoding",
            view="drop",
            gene_vector_dim=vector_dim,
        )
    )
    # forward and backward are 6 FLOPs per weight and cell: up and down of each block, the decoder
    # and its table
    blocks = 6 * layers * 8 * hidden**2
    decoder = 6 * (hidden * 256 + 256 * (genes + 2))
    assert size.flops.block_per_pair == 0
    assert size.flops.count(Load(1, 0, 0)) == pytest.approx(0, abs=1)
    assert size.n_blocks * size.flops.block_per_cell == pytest.approx(blocks)
    projection = 6 * hidden * (vector_dim or 0)
    assert size.flops.count(Load(1000, 1e6, 1)) == pytest.approx(blocks + decoder + projection)


@pytest.mark.parametrize("family", ["encoder", "autoencoder"])
def test_a_run_by_size_is_the_run_with_its_numbers(family: str) -> None:
    by_name, by_numbers = (
        train_options(model={"family": family} | model)
        for model in ({"size": "51M"}, {"hidden": 512, "layers": 12, "heads": 8})
    )
    assert identity(by_name, None) == identity(by_numbers, None)
    assert by_name.model_dump() == by_numbers.model_dump()
    assert "size" not in by_name.model.model_dump()


def test_explicit_keys_override_a_named_size() -> None:
    explicit = FamilyConfig.model_validate({"size": "10M", "layers": 2, "heads": 8}).model_dump()
    assert explicit.items() >= {"hidden": 256, "layers": 2, "heads": 8}.items()
    tree = {
        "corpora": {"a": {}},
        "model": {"hidden": 128, "layers": 2, "dropout": 0.1},
        "train": {"steps": 1},
        "runs": {
            "named": {"corpus": "a", "model": {"size": "10M"}},
            "shallow": {"corpus": "a", "model": {"size": "10M", "layers": 1}},
            "same": {"corpus": "a"},
        },
    }
    runs = check_config(tree).runs
    found = {}
    for name, run in runs.items():
        model = run.model
        found[name] = (model.hidden, model.layers, model.heads, model.dropout)
    assert found == {
        "named": (256, 6, 4, 0.1),
        "shallow": (256, 1, 4, 0.1),
        "same": (128, 2, 4, 0.1),
    }


def test_an_unknown_size_is_answered_with_the_names() -> None:
    names = "'10M', '51M', '106M', '300M', '1B' or '3B'"
    with refused(f"config.yaml: size: input should be {names}, got '50M'"):
        check_options(FamilyConfig, {"size": "50M"}, "config.yaml")


@pytest.mark.full
def test_the_documented_sizes_match_the_plan() -> None:
    rows = dict(re.findall(r"^(\d+[MB]) +(\d.*)$", documentation(), re.M))
    assert list(rows) == list(SIZES)
    for name, of in SIZES.items():
        size = measure_size(spec(20_000, family="encoder", objective="cell_decoding", **of))
        encoder = size.parameters - size.finish.parameters
        assert of["hidden"] == 64 * of["heads"]
        assert 5e6 < size.finish.parameters < 6.5e6
        stated = [of["hidden"], of["layers"], of["heads"], f"{encoder / 1e6:,.1f}"]
        assert rows[name].split() == [str(number) for number in stated]
