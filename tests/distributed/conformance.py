"""The table of models and layouts that `test_conformance` takes its cases from."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from cellmill.config.parts.methods import OptimizerConfig
from tests.distributed.conftest import options
from tests.models import split

Layout = dict[str, Any]
OPTIMIZERS = list(OptimizerConfig.built_in())
SP = {"sequence_parallel": True}
FULL_SHARD: Layout = {"sharding_strategy": "FULL_SHARD"}
AXES: dict[str, Layout] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": FULL_SHARD,
    "tp": {"tp": 2} | SP,
    "pp": {"pp": 2},
}
"""One axis each, on two processes."""
LAYOUTS: dict[str, Layout] = {
    "ddp": {"strategy": "ddp"},
    "FULL_SHARD": {"strategy": "fsdp"} | FULL_SHARD,
    "SHARD_GRAD_OP": {"strategy": "fsdp", "sharding_strategy": "SHARD_GRAD_OP"},
    "HYBRID_SHARD": {"strategy": "fsdp", "sharding_strategy": "HYBRID_SHARD"},
    "HYBRID_SHARD of 4": {"strategy": "fsdp", "sharding_strategy": "HYBRID_SHARD", "shard_size": 4},
    "NO_SHARD": {"strategy": "fsdp", "sharding_strategy": "NO_SHARD"},
    "tp 4": {"tp": 4},
    "tp 4, sequence parallel": {"tp": 4} | SP,
    "FULL_SHARD x tp 2": {"tp": 2} | FULL_SHARD,
    "FULL_SHARD x tp 2, sequence parallel": {"tp": 2} | SP | FULL_SHARD,
    "NO_SHARD x tp 2, sequence parallel": {"sharding_strategy": "NO_SHARD", "tp": 2} | SP,
    "ddp x tp 2": {"strategy": "ddp", "tp": 2},
}
TP = "FULL_SHARD x tp 2, sequence parallel"
PP = "pp 2, 1F1B x FULL_SHARD"
PIPELINES: dict[str, Layout] = {
    "pp 4, GPipe": {"pp": 4, "schedule": "GPipe"},
    "pp 4, 1F1B": {"pp": 4},
    "pp 2, 1F1B x FULL_SHARD": {"pp": 2} | FULL_SHARD,
    "pp 2, 1F1B x ddp": {"pp": 2, "strategy": "ddp"},
    "pp 2, 1F1B x tp 2": {"pp": 2, "tp": 2},
    "pp 2, Interleaved1F1B x tp 2, sequence parallel": {
        "pp": 2,
        "schedule": "Interleaved1F1B",
        "tp": 2,
    }
    | SP,
    "pp 2, Interleaved1F1B x FULL_SHARD": {"pp": 2, "schedule": "Interleaved1F1B"} | FULL_SHARD,
    "pp 2, InterleavedZeroBubble x HYBRID_SHARD": {"pp": 2, "schedule": "InterleavedZeroBubble"},
    "pp 2, ZBV x SHARD_GRAD_OP": {"pp": 2, "schedule": "ZBV", "sharding_strategy": "SHARD_GRAD_OP"},
    "pp 2, DualPipeV x FULL_SHARD": {"pp": 2, "schedule": "DualPipeV"} | FULL_SHARD,
    "pp 4, ZBV": {"pp": 4, "schedule": "ZBV"},
}
THREE_AXES: dict[str, Layout] = {
    "replicate 2 x shard 2 x tp 2, sequence parallel": {
        "sharding_strategy": "HYBRID_SHARD",
        "tp": 2,
    }
    | SP,
    "pp 2 x replicate 2 x shard 2": {"pp": 2, "sharding_strategy": "HYBRID_SHARD", "shard_size": 2},
    "pp 2, ZBV x FULL_SHARD of 2 x tp 2, sequence parallel": {"pp": 2, "schedule": "ZBV", "tp": 2}
    | SP
    | FULL_SHARD,
}
"""Layouts of eight processes."""
MORE: dict[str, Layout] = {
    "one process": {},
    "tp of whole tokens": {"tp": 2},
    "pp 2, ZBV x tp 2": {"pp": 2, "schedule": "ZBV", "tp": 2},
    "HYBRID_SHARD x tp 2": {"sharding_strategy": "HYBRID_SHARD", "tp": 2},
    "HYBRID_SHARD, offloaded": {"cpu_offload": "optimizer"},
    "HYBRID_SHARD, on the CPU": {"cpu_offload": "full"},
    "FULL_SHARD, on the CPU": {"cpu_offload": "full"} | FULL_SHARD,
    "FULL_SHARD x tp 2, offloaded": LAYOUTS[TP] | {"cpu_offload": "optimizer"},
    "pp 2, offloaded": {"pp": 2, "cpu_offload": "optimizer"} | FULL_SHARD,
}
EVERY: dict[str, Layout] = AXES | LAYOUTS | PIPELINES | THREE_AXES | MORE

SIZES = {"hidden": 32, "layers": 2, "heads": 4, "dropout": 0.1}
ENCODER: dict[str, Any] = {"family": "encoder"} | SIZES
PROFILE: dict[str, Any] = {"family": "profile", "hidden": 32, "layers": 2, "dropout": 0.1}
QUERY = {"objective": "query_decoding", "decoder_hidden": 16, "decoder_layers": 1, "max_asked": 12}
LABEL = {"label_column": "cell_type"}
AGE = {"target_column": "age", "target_mean": 40.0, "target_std": 9.0}
BATCH = {"batch_column": "batch", "batch_adversary": 0.5, "batch_adversary_scale": 2.0}
DECODING = {"objective": "cell_decoding"}
VICREG = DECODING | {
    "view_loss": "vicreg",
    "invariance_weight": 1,
    "variance_weight": 1,
    "covariance_weight": 0.04,
}
VECTORS = {"gene_vectors": "VECTORS", "gene_vector_dim": 6}
MASKED = {"mask_frac": 0.3, "random_frac": 0.2, "keep_frac": 0.2}
TAUGHT = {
    "teacher": "./big",
    "vectors": {"width": 6, "sha256": "", "shards": "", "model": "", "supervised_by": []},
}
NUMBER = {"objective": "regression", "head_hidden": 8, "head_dropout": 0.3} | AGE
RESPONSE = {
    "objective": "perturbation_response",
    "perturbation_column": "donor",
    "control": "donor_0",
}
SUM_OF_LABELS = {
    "classification": LABEL,
    "hidden": {"name": "classification", "adversarial_scale": 0.1} | LABEL,
    "cell_decoding": {},
}
SEVERAL_HEADS = {
    "kind": {"name": "classification", "label_column": "few"},
    "lot": {"name": "classification", "label_column": "batch"},
    "age": {"name": "regression"} | AGE,
    "depth": {
        "name": "regression",
        "target_column": "depth",
        "target_mean": 4e3,
        "target_std": 1e3,
    },
    "cell_decoding": {},
}
VIEWS = {"view_loss": "vicreg"}
CONTRASTED = {
    "supervised_contrastive": LABEL | {"weight": 0.3},
    "cell_decoding": {"decoder_hidden": 16} | VIEWS,
    "masked_value": {"weight": 0.5},
}
ESM = {
    "model_type": "esm",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 130,
    "position_embedding_type": "rotary",
    "token_dropout": True,
}
PAIRS: dict[str, dict[str, Any]] = {
    "masked_value": ENCODER,
    "masked_gene": {
        "family": "bert",
        "ends": "cls_eos",
        "objective": "masked_gene",
        "cell_loss_weight": 0.5,
    }
    | SIZES,
    "cell_decoding": {"family": "scgpt", "ends": "cls", "pooling": "cls"} | DECODING | SIZES,
    "query_decoding": {"family": "autoencoder", "latent": 12} | SIZES | QUERY,
    "denoise": PROFILE | {"objective": "denoise"},
    "next_gene": {"family": "autoregressive", "objective": "next_gene"} | SIZES,
    "perturbation_response": ENCODER
    | RESPONSE
    | {"perturbed_genes": {"donor_1": [5, 90], "donor_2": [40]}, "dropout": 0.0}
    | BATCH,
    "supervised_contrastive": ENCODER
    | {"objective": "supervised_contrastive", "temperature": 0.3}
    | LABEL,
    "classification": ENCODER
    | {
        "objective": "classification",
        "head_hidden": 8,
        "head_dropout": 0.3,
        "class_weights": {"type1": 3.0},
    }
    | {"label_column": "few"},
    "regression": ENCODER | NUMBER | {"loss": "huber", "huber_delta": 0.5},
    "distill": ENCODER | {"objective": "distill"} | TAUGHT,
    "sum": ENCODER
    | {
        "objective": "sum",
        "parts": {
            "cell_decoding": {"decoder_hidden": 16},
            "masked_value": {"weight": 0.3, "mask_frac": 0.3},
        },
    },
}
"""One model of each objective; together they have every family whose layers cellmill makes."""
OTHERS: dict[str, dict[str, Any]] = {
    "genes": ENCODER | {"objective": "masked_gene"},
    "four layers, genes": ENCODER | {"layers": 4, "objective": "masked_gene"},
    "eight layers": ENCODER | {"layers": 8},
    # ties the first and the last stage
    "eight layers, genes": ENCODER | {"layers": 8, "objective": "masked_gene"},
    "next_gene, binned": PAIRS["next_gene"],
    "encoder, batch": ENCODER | DECODING | BATCH | {"dropout": 0.0},
    "profile, batch": PROFILE
    | DECODING
    | BATCH
    | {"layers": 1, "decoder_hidden": None, "dropout": 0.0},
    "encoder, decoding": ENCODER | DECODING,
    "encoder, thinned": ENCODER | DECODING | {"view": "thin", "decoder_hidden": None},
    "encoder without blocks": ENCODER | DECODING | {"layers": 0, "weights": "counts"},
    "profile, decoding": PROFILE | DECODING,
    "sum of labels": ENCODER | {"objective": "sum", "parts": SUM_OF_LABELS},
    "sum of contrasts": ENCODER | {"objective": "sum", "parts": CONTRASTED},
    "negative binomial": ENCODER | DECODING | {"likelihood": "nb", "decoder_hidden": 16},
    "cls": ENCODER | DECODING | {"pooling": "cls"},
    "attention, renormalized": ENCODER | {"pooling": "attention", "renormalize": True},
    "vectors": ENCODER | MASKED | VECTORS,
    "vectors, trained": ENCODER | MASKED | VECTORS | {"train_gene_vectors": True},
    "profile, vectors": PROFILE | DECODING | VECTORS | {"layers": 1, "dropout": 0.0},
    "profile, vectors, trained": PROFILE
    | DECODING
    | VECTORS
    | {"layers": 1, "train_gene_vectors": True},
    "encoder, queries": ENCODER | QUERY,
    "pearson": ENCODER | NUMBER | {"loss": "pearson"},
    "sum with numbers": ENCODER
    | {
        "objective": "sum",
        "parts": {"age": {"name": "regression", "loss": "pearson"} | AGE, "cell_decoding": VIEWS},
    },
    "student": PROFILE
    | {"objective": "sum", "parts": {"cell_decoding": VIEWS, "distill": TAUGHT | {"weight": 0.5}}},
    "several heads": ENCODER | {"objective": "sum", "parts": SEVERAL_HEADS},
    "view loss": ENCODER | VICREG,
    "profile, view loss": PROFILE | VICREG,
    "proteins": ENCODER | {"objective": "masked_gene"},
    "hf": {"family": "hf", "architecture": ESM, "objective": "masked_gene", "cell_loss_weight": 0},
    "average": ENCODER | {"layers": 4},
    "buffered": ENCODER | {"family": "buffered", "layers": 4},
} | {f"optimizer {name}": ENCODER for name in OPTIMIZERS}
MODELS = PAIRS | OTHERS
BINNED = {"tokenizer": "binned"}
SEQUENCE = {"tokenizer": "sequence"}
RANDOM = {"truncation": "random", "zero_frac": 0.2}
TOKENS: dict[str, dict[str, Any]] = {
    "masked_gene": {"tokenizer": "rank"},
    "cell_decoding": BINNED,
    "next_gene, binned": BINNED,
    "encoder, batch": {"covariates": ["donor", "batch"], "covariate_unknown_frac": 0.3},
    "vectors": RANDOM,
    "vectors, trained": RANDOM,
    "proteins": SEQUENCE,
    "hf": SEQUENCE,
}
TRAIN: dict[str, dict[str, Any]] = {
    "average": {"lr": 1e-2, "ema_decay": 0.3, "val_every_steps": 1},
    "optimizer muon": {"lr": 2e-3},
}
STEPS = 4
EACH = 2


CORPORA = {"proteins": "proteins", "hf": "proteins"}
DEFAULT: dict[str, Any] = {"token_budget": 512}


@dataclass(frozen=True)
class Case:
    """A model, its layout, and how its steps are cut and computed, which changes no number."""

    model: str
    layout: str
    ranks: int = 4
    train: dict[str, Any] = field(default_factory=lambda: DEFAULT)
    parallel: Layout = field(default_factory=dict)
    precision: str = "32-true"

    def __str__(self) -> str:
        cut = self.parallel | (self.train if self.train != DEFAULT else {})
        more = [f"{key} {value}" for key, value in cut.items()]
        return ", ".join(
            [
                self.model,
                f"{self.layout} on {self.ranks}",
                *more,
                *([self.precision] * (self.precision != "32-true")),
            ]
        )


def run(
    model: str, layout: Layout, train: dict[str, Any], precision: str = "32-true"
) -> dict[str, Any]:
    """Options of a training of a model of the table."""
    optimizer = {"optimizer": model.split()[1]} if model.startswith("optimizer") else {}
    course = {
        "schedule": "constant",
        "val_every_steps": EACH,
        "checkpoint_every_steps": 100,
    } | optimizer
    tokens = TOKENS.get(model, {})
    layout = layout | {"precision": precision}
    sections = split(MODELS[model])
    # objectives have an option of this name too
    sections["model"] |= {"weights": "random"} if model == "hf" else {}
    return options(layout, tokens=tokens, train=course | TRAIN.get(model, {}) | train) | sections


def spread(case: Case) -> dict[str, Any]:
    """Options of the case in its layout."""
    return run(case.model, EVERY[case.layout] | case.parallel, case.train, case.precision)


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def of_family(name: str) -> list[Any]:
    """Skipped where the family's package is missing."""
    missing = name == "hf" and find_spec("transformers") is None
    return (
        [pytest.mark.skip(reason="transformers is not installed: pip install 'cellmill[hf]'")]
        if missing
        else []
    )


def grouped(given: Case, full: bool, *more: Any) -> Any:
    """A row of the table: cases of one number of processes share a pool, and torch's caches in it."""
    group = pytest.mark.xdist_group(f"layouts of {given.ranks}")
    marks = [group, *of_family(given.model), *([pytest.mark.full] if full else [])]
    return pytest.param(
        given, *more, marks=marks, id=str(given) if not more else f"{given.model}, {more[0]}"
    )


def digest_of(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


PP_TP = "pp 2, 1F1B x tp 2"
FEW = {"token_budget": 256}
SMALL = {"token_budget": 100}
PARTS4 = {"microbatches": 4}
WHOLE, HALF, THIRD = ({"token_budget": n} for n in (4096, 1024, 300))
FULL, SELECTIVE = ({"activation_checkpointing": how} for how in ("full", "selective"))
OFFLOADED = {"cpu_offload": "optimizer"}
ON_CPU = {"cpu_offload": "full"}
BF16 = "bf16-mixed"


def each(
    models: str | list[str], layouts: Iterable[str], ranks: int = 4, **more: Any
) -> list[Case]:
    """Each model in each layout."""
    return [
        Case(m, at, ranks, **more)
        for m in ([models] if isinstance(models, str) else models)
        for at in layouts
    ]


COMBINED: list[Case] = [
    *each("genes", ["SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", "FULL_SHARD x tp 2", TP]),
    Case("genes", "ddp x tp 2", parallel=SELECTIVE),
    Case("genes", "HYBRID_SHARD", parallel=OFFLOADED | FULL),
    Case("genes", "FULL_SHARD", parallel=ON_CPU, train=THIRD),
    Case("four layers, genes", "pp 2, ZBV x SHARD_GRAD_OP"),
    Case("four layers, genes", "pp 2, Interleaved1F1B x FULL_SHARD", parallel=FULL),
    Case("genes", PP_TP),
    Case("genes", "HYBRID_SHARD", precision=BF16),
    *each([*PAIRS], ["FULL_SHARD"], 2, train=FEW, precision=BF16),
]
"""Combined axes, of one model."""
PRODUCT: list[Case] = [
    # every other layout once, and each way to offload and to recompute with every axis; four
    # processes compute nothing in ddp and FULL_SHARD that two do not
    Case("masked_value", "ddp", 2, parallel=OFFLOADED | FULL),
    Case("masked_value", "FULL_SHARD", 2, parallel=OFFLOADED | SELECTIVE),
    Case("masked_value", "HYBRID_SHARD", parallel=ON_CPU | SELECTIVE, train=THIRD),
    Case("genes", "HYBRID_SHARD of 4"),
    Case("masked_value", "NO_SHARD", parallel=ON_CPU, train=THIRD),
    Case("masked_value", "tp 4", parallel=OFFLOADED | FULL),
    Case("masked_value", "tp 4, sequence parallel"),
    Case("genes", "NO_SHARD x tp 2, sequence parallel"),
    Case("masked_value", TP, parallel=ON_CPU | SELECTIVE, train=THIRD),
    Case("masked_value", TP, parallel=OFFLOADED | FULL),
    Case("masked_value", PP, parallel=ON_CPU | SELECTIVE, train=THIRD),
    Case("masked_value", PP, parallel=OFFLOADED | FULL),
    *each(
        "eight layers, genes",
        [
            "pp 4, GPipe",
            "pp 4, 1F1B",
            "pp 2, 1F1B x ddp",
            "pp 2, Interleaved1F1B x tp 2, sequence parallel",
            "pp 2, InterleavedZeroBubble x HYBRID_SHARD",
            "pp 2, DualPipeV x FULL_SHARD",
            "pp 4, ZBV",
        ],
    ),
    *each("eight layers, genes", [name for name in THREE_AXES if "pp" in name], 8),
    Case("genes", "replicate 2 x shard 2 x tp 2, sequence parallel", 8),
    Case("masked_value", "ddp", 2, parallel=OFFLOADED, precision=BF16),
    Case("masked_value", "FULL_SHARD", 2, parallel=ON_CPU | SELECTIVE, precision=BF16),
    Case("masked_value", TP, precision=BF16),
    *each("eight layers", ["pp 4, 1F1B", PP_TP], precision=BF16),
    # every other part of a model, on an axis that cuts it and on one that does not where these
    # differ
    *each("next_gene, binned", ["tp 4", PP_TP], train=FEW),
    *each("encoder, batch", ["HYBRID_SHARD", PP_TP], train=FEW),
    *each(["profile, batch", "profile, decoding"], ["FULL_SHARD x tp 2"], train=FEW),
    *each(
        ["perturbation_response", "cell_decoding", "encoder, queries", "negative binomial"],
        [PP_TP],
        train=FEW,
    ),
    *each(["encoder, thinned", "profile, vectors, trained"], ["tp 4"], train=FEW),
    *each(["encoder without blocks", "vectors, trained", "encoder, decoding"], [TP], train=FEW),
    Case("cls", TP, train=FEW),  # in a pipeline: cell_decoding, above
    *each("attention, renormalized", [TP, PP], train=FEW),
    *each("vectors", ["HYBRID_SHARD", PP_TP], train=FEW),
    Case("profile, vectors", "ddp", 2, train=FEW),
    Case("sum of contrasts", "HYBRID_SHARD", train=FEW),  # the line has the loss of each part
    *each(["query_decoding", "sum"], [PP], train=FEW),
    *each(["classification", "several heads", "view loss"], [TP], train=WHOLE),
    Case("pearson", "ddp", 2, train=HALF),
    Case("pearson", "HYBRID_SHARD x tp 2", train={"token_budget": 2048}),
    Case("sum with numbers", "FULL_SHARD", 2, train=HALF),
    # a rank needs a new schedule of torch where its lengths change, its data-parallel peer maybe
    # not
    *each(
        ["classification", "supervised_contrastive", "pearson", "view loss"],
        [PP],
        parallel=PARTS4,
        train=WHOLE,
    ),
    Case("profile, view loss", "ddp", 2, train=WHOLE),
    Case("student", "FULL_SHARD x tp 2", train=FEW),
    Case("hf", "HYBRID_SHARD", parallel=FULL),
    *each("buffered", ["HYBRID_SHARD", TP, "pp 2, ZBV x SHARD_GRAD_OP"]),
    Case("buffered", "ddp", 2),
    Case("buffered", "FULL_SHARD", 2, parallel=ON_CPU | FULL),
]
"""With COMBINED and the axes on two processes, every layout, part of a model, precision, offload
and recomputation on every axis: pairs of them, not the product.
"""
AT_EACH, AT_END = ({"gradient_reduction": how} for how in ("micro_batch", "step"))
QUICK_CUTS = [
    Case("view loss", "fsdp", 2, {"token_budget": 128}),
    Case("supervised_contrastive", "ddp", 2, {"token_budget": 128}),
    Case("student", "fsdp", 2, {"token_budget": 128}),
    Case("genes", "HYBRID_SHARD", train=SMALL, parallel=AT_EACH),
    Case("four layers, genes", "pp", 2, SMALL),
    Case("masked_value", "fsdp", 2, parallel=FULL),
]
MORE_CUTS = [
    Case("sum of contrasts", "ddp", 2, {"token_budget": 128}),
    *each("masked_value", ["HYBRID_SHARD", "ddp", TP], train=SMALL, parallel=AT_END),
    Case("masked_value", TP, train=THIRD, parallel=AT_EACH),
    Case("eight layers", "pp 2, InterleavedZeroBubble x HYBRID_SHARD", train=SMALL, parallel=FULL),
    Case("eight layers", "pp 4, ZBV", parallel={"microbatches": 12} | FULL),
]
CUTS = [
    *(grouped(case, False) for case in QUICK_CUTS),
    *(grouped(case, True) for case in MORE_CUTS),
]
"""How a step is cut into micro-batches and computed."""
CHAINS: list[tuple[int, str, list[str], bool]] = [
    (2, "optimizer adamw", ["tp", "pp", "one process"], False),
    *((2, f"optimizer {name}", ["ddp", "tp"], False) for name in OPTIMIZERS if name != "adamw"),
    (2, "average", ["fsdp", "pp"], False),
    (2, "buffered", ["pp", "fsdp"], False),
    (2, "distill", ["one process", "pp"], False),
    (4, "genes", [TP, PP, "HYBRID_SHARD, offloaded"], False),
    # which keeps AdamW's states of all but matrices
    (4, "optimizer muon", ["tp 4", TP, "FULL_SHARD", "one process"], True),
    (4, "optimizer muon", [PP_TP, "HYBRID_SHARD", PP, "ddp"], True),
    (4, "eight layers, genes", [PP, TP, "pp 4, ZBV", "FULL_SHARD", "one process"], True),
    (4, "average", ["ddp", TP, "pp 2, ZBV x tp 2", "HYBRID_SHARD, on the CPU"], True),
    (
        4,
        "masked_value",
        ["FULL_SHARD x tp 2, offloaded", "ddp", "FULL_SHARD, on the CPU", "pp 2, offloaded"],
        True,
    ),
    (
        4,
        "masked_value",
        ["pp 2, offloaded", "one process", "HYBRID_SHARD of 4", "tp 4, sequence parallel"],
        True,
    ),
    (4, "masked_value", ["HYBRID_SHARD", "SHARD_GRAD_OP", "ddp x tp 2", "NO_SHARD"], True),
    (4, "buffered", [TP, "pp 2, ZBV x SHARD_GRAD_OP", "FULL_SHARD, on the CPU"], True),
    (4, "next_gene", ["one process", PP], True),
    (4, "query_decoding", ["one process", "FULL_SHARD x tp 2"], True),
    (4, "denoise", ["HYBRID_SHARD", "FULL_SHARD x tp 2"], True),
    (4, "sum of labels", ["HYBRID_SHARD", "FULL_SHARD x tp 2"], True),
]
"""Layouts that a run goes through, two steps in each."""
