"""Golden record: what a change that moves code must leave as it was, to the bit.

`python -m tests.golden COMMIT` records this commit and COMMIT, each in a clone of its own and on
this machine (the last bits of a sum depend on the CPU), and prints every entry that differs. An
entry is a digest of:

- `cells`, `vocabulary`, `shards`: every array of the files that `preprocess`, `vocabulary` and `shard` write;
- `batches`: the first 20 steps of streams with several lanes, ranks, tokenizers, weights, equal steps and resumed ones;
- `curve`: losses and gradient norms of every objective in one process, and of some in each layout; `weights`: the
  exported model;
- `options`, `identity`: options of every stage of the demo and of every example;
- `demo`: metrics, embeddings and the dry run of the finished demo.

Everything runs through the command line, so that the same script records commits whose modules have
other names.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

LABEL = {"label_column": "cell_type"}
SIZES = {"hidden": 16, "layers": 2, "heads": 2, "dropout": 0.1}
ENCODER = {"family": "encoder"} | SIZES
PROFILE = {"family": "profile", "hidden": 16, "layers": 2, "dropout": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "masked_value": {"model": ENCODER, "objective": {"name": "masked_value"}},
    "masked_gene": {
        "model": {"family": "bert", "ends": "cls_eos"} | SIZES,
        "tokens": {"tokenizer": "rank"},
        "objective": {"name": "masked_gene", "cell_loss_weight": 0.5},
    },
    "cell_decoding": {
        "model": {"family": "scgpt", "ends": "cls", "pooling": "cls"} | SIZES,
        "tokens": {"tokenizer": "binned"},
        "objective": {"name": "cell_decoding"},
    },
    "profile": {
        "model": PROFILE,
        "objective": {"name": "cell_decoding", "view": "drop_thin", "view_loss": "vicreg"},
    },
    "query_decoding": {
        "model": {"family": "autoencoder", "latent": 8} | SIZES,
        "objective": {
            "name": "query_decoding",
            "decoder_hidden": 8,
            "decoder_layers": 1,
            "max_asked": 12,
        },
    },
    "denoise": {"model": PROFILE, "objective": {"name": "denoise"}},
    "next_gene": {
        "model": {"family": "autoregressive"} | SIZES,
        "objective": {"name": "next_gene"},
    },
    "perturbation_response": {
        "model": ENCODER,
        "objective": {
            "name": "perturbation_response",
            "perturbation_column": "perturbation",
            "control": "control",
        },
    },
    "supervised_contrastive": {
        "model": ENCODER,
        "objective": {"name": "supervised_contrastive"} | LABEL,
    },
    "classification": {
        "model": ENCODER,
        "objective": {"name": "classification", "head_hidden": 8} | LABEL,
    },
    "regression": {
        "model": ENCODER,
        "objective": {
            "name": "regression",
            "target_column": "age",
            "target_mean": 40.0,
            "target_std": 9.0,
        },
    },
    "sum": {
        "model": ENCODER | {"gene_vectors": None},
        "objective": {
            "name": "sum",
            "parts": {"classification": LABEL, "cell_decoding": {"likelihood": "nb"}},
        },
    },
    "covariates": {
        "model": ENCODER,
        "tokens": {"covariates": ["batch"], "covariate_unknown_frac": 0.3, "truncation": "random"},
        "objective": {"name": "cell_decoding", "batch_column": "batch", "batch_adversary": 0.5},
    },
    "muon": {
        "model": ENCODER,
        "objective": {"name": "masked_value"},
        "train": {"optimizer": "muon", "lr": 5e-3},
    },
    "average": {
        "model": ENCODER,
        "objective": {"name": "masked_value"},
        "train": {"ema_decay": 0.9},
    },
    "weighted": {
        "model": PROFILE,
        "objective": {"name": "cell_decoding"},
        "stream": {"weight_by": "cell_type", "weight_exponent": 0.5},
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "HYBRID_SHARD": {"strategy": "fsdp", "sharding_strategy": "HYBRID_SHARD"},
    "tp 2": {"tp": 2, "sequence_parallel": True},
    "pp 2": {"pp": 2},
    "bf16": {"precision": "bf16-mixed", "sharding_strategy": "FULL_SHARD"},
    "offload": {"sharding_strategy": "FULL_SHARD", "cpu_offload": "full"},
}
IN_LAYOUTS = ("masked_value", "cell_decoding", "profile", "classification")
STREAMS: dict[str, dict[str, Any]] = {
    "continuous": {},
    "four lanes, second of two ranks": {"stream": {"lanes": 4}, "rank": 1, "world": 2},
    "resumed at step 7": {"start": 7},
    "weighted": {"stream": {"weight_by": "cell_type", "weight_exponent": 0.5}},
    "equal steps": {"stream": {"lanes": 4, "equal_steps": True}},
    "a part": {"stream": {"train_frac": 0.5}},
    "rank": {"tokens": {"tokenizer": "rank"}},
    "binned, counted": {"tokens": {"tokenizer": "binned"}, "with_counts": True},
    "cut at random": {"tokens": {"truncation": "random", "zero_frac": 0.2, "max_tokens": 24}},
    "levels and numbers": {
        "columns": {"cell_type": "a", "batch": "b"},
        "number_columns": {"age": "c"},
    },
    "in one fixed order": {"shuffle": False},
}
STEPS = 6
TRAIN = {"steps": STEPS, "global_batch": 16, "token_budget": 256, "warmup_steps": 1}
TRAIN |= {"val_every_steps": 3, "log_every_steps": 1}
SHARED = {"stream": {"lanes": 2, "block_cells": 8, "window_blocks": 2}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("commit", help="to compare with")
    parser.add_argument("--keep", type=Path, help="folder for the two records, as JSON")
    parser.add_argument(
        "--only", nargs="*", help="parts to record", choices=list(PARTS), default=list(PARTS)
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cellmill-golden-") as scratch:
        records = []
        for name in (options.commit, "HEAD"):
            checkout = Path(scratch) / f"{len(records)}"
            _git("clone", "--quiet", ".", str(checkout))
            _git("checkout", "--quiet", _git("rev-parse", name).strip(), cwd=checkout)
            records.append(record(checkout, options.only))
            if options.keep:
                options.keep.mkdir(parents=True, exist_ok=True)
                (options.keep / f"{name}.json").write_text(json.dumps(records[-1], indent=1))
    before, now = records
    differ = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    for key in differ:
        print(f"{key}: {before.get(key)} -> {now.get(key)}")
    print(f"{len(now)} entries, {len(differ)} differ from {options.commit}")
    sys.exit(bool(differ))


def record(checkout: Path, parts: list[str]) -> dict[str, str]:
    """Return {entry: digest} of the cellmill in `checkout`."""
    found: dict[str, str] = {}
    work = checkout.parent / f"{checkout.name}-work"
    work.mkdir()
    _corpus(checkout, work)
    for part in parts:
        found |= PARTS[part](checkout, work)
    return found


def _corpus(checkout: Path, work: Path) -> None:
    """Two datasets of simulated cells, with ages, as shards in `work`."""
    (work / "table.tsv").write_text(
        "dataset\tpath\n" + "".join(f"{d}\t{work}/{d}.h5ad\n" for d in "ab")
    )
    tree = {
        "corpora": {"sim": {"table": f"{work}/table.tsv"}},
        "preprocess": {"min_genes": 1},
        "shard": {"val_frac": 0.2, "cells_per_shard": 70},
        "model": PROFILE,
        "runs": {"a": {"corpus": "sim"}},
        "train": {"steps": 1},
    }
    (work / "config.yaml").write_text(json.dumps(tree))
    shared = f"--config {work}/config.yaml --corpus sim"
    for seed, dataset in enumerate("ab"):
        raw = f"{work}/{dataset}.h5ad"
        _cellmill(
            checkout, f"simulate --out {raw} --cells 130 --genes 90 --perturbations 4 --seed {seed}"
        )
        _python(checkout, _AGE, raw)
        files = f"--input {raw} --out {work}/cells/{dataset}.h5ad --report {work}/{dataset}.json"
        _cellmill(checkout, f"preprocess {shared} --dataset {dataset} {files}")
    cells = f"--cells {work}/cells/a.h5ad {work}/cells/b.h5ad"
    _cellmill(checkout, f"vocabulary {shared} {cells} --out {work}/vocabulary.tsv")
    _cellmill(
        checkout,
        f"shard {shared} {cells} --vocabulary {work}/vocabulary.tsv --out {work}/shards/manifest.json",
    )


_AGE = """
import sys
import anndata as ad, numpy as np
cells = ad.read_h5ad(sys.argv[1])
cells.obs["age"] = np.random.default_rng(0).integers(20, 70, len(cells)).astype(float)
cells.write_h5ad(sys.argv[1])
"""
_DIGESTS = """
import hashlib, json, sys
import h5py, numpy as np
def of(node):
    found = hashlib.sha256()
    def visit(name, item):
        found.update(name.encode())
        if isinstance(item, h5py.Dataset):
            value = item[()]
            value = np.asarray(value)
            found.update(str((value.shape, str(value.dtype))).encode())
            raw = repr(value.tolist()).encode() if value.dtype == object else np.ascontiguousarray(value).tobytes()
            found.update(raw)
    node.visititems(visit)
    return found.hexdigest()[:16]
print(json.dumps([of(h5py.File(path)) for path in sys.argv[1:]]))
"""
_STREAMS = """
import dataclasses, hashlib, inspect, json, sys
from itertools import islice
from pathlib import Path
try:
    from cellmill.data.stream import CellStream
except ImportError:
    from cellmill.data.stream.cell_stream import CellStream
from cellmill.config.run import Stream
from cellmill.config.parts.tokens import Tokens
manifest, streams, shared = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
renamed = {"token_ids": "genes", "cell_ids": "cells"}  # their names in earlier commits
found = {}
for name, given in streams.items():
    start = given.pop("start", 0)
    options = Stream.model_validate(shared | given.pop("stream", {}))
    tokens = Tokens.model_validate({"max_tokens": 40} | given.pop("tokens", {}))
    given = dict(rank=0, world=1, token_budget=256) | given
    names = inspect.signature(CellStream).parameters
    if "with_counts" in given and not {"with_counts", "fields"} & names.keys():
        given["counted"] = given.pop("with_counts")  # its name in earlier commits
    if "fields" in names:  # one argument each in earlier commits
        from cellmill.data.stream.batch_maker import BatchFields
        from cellmill.data.stream.micro_batches import MicroBatchRule
        from cellmill.data.stream.order import DataRank
        fields = [field.name for field in dataclasses.fields(BatchFields)]
        if "columns" in given and "columns" not in fields:  # its name in earlier commits
            given["level_columns"] = given.pop("columns")
        fields = [name for name in fields if name in given]
        given["fields"] = BatchFields(**{name: given.pop(name) for name in fields})
        # its names in this and earlier commits
        [key] = {"micro_batch_rule", "micro_batches", "rule"} & names.keys()
        given[key] = MicroBatchRule(given.pop("token_budget"))
        given["data_rank"] = DataRank(given.pop("rank"), given.pop("world"))
    if {"order_options", "order"} & names.keys():
        from cellmill.data.stream import cell_stream, order
        # their names in earlier commits: SplitCells and StreamOrder
        source = getattr(cell_stream, "SplitSource", None) or cell_stream.SplitCells
        order_options = getattr(order, "OrderOptions", None) or order.StreamOrder
        ordered = order_options(options, 16, 3, given.pop("shuffle", True))
        stream = CellStream(source(manifest, "train"), ordered, tokens, **given)
    else:  # earlier commits
        stream = CellStream(manifest, "train", tokens, options, global_batch=16, seed=3, **given)
    if start:
        stream.load_state_dict(stream.state_dict() | {"step": start})
    digest = hashlib.sha256()
    for batches in islice(stream, 20):
        for batch in batches:
            arrays = {renamed.get(key, key): value for key, value in vars(batch).items()}
            for key, value in sorted(arrays.items()):
                if hasattr(value, "dtype"):
                    digest.update(f"{key} {value.dtype} {value.shape}".encode() + value.tobytes())
    stream.close()
    found[name] = digest.hexdigest()[:16]
print(json.dumps(found))
"""
_OPTIONS = """
import hashlib, json, sys
from pathlib import Path
from cellmill.config.load import load_config
from cellmill.config.options import OPTIONS, TrainOptions
from cellmill.runs.identity import identity
def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
found = {}
for path in [Path("config/config.yaml"), *sorted(Path("config/examples").glob("*.yaml"))]:
    try:
        config = load_config(path)
    except Exception as error:
        found[f"options {path.stem}"] = f"{type(error).__name__}: {error}"
        continue
    for stage in OPTIONS:
        sections = {name: config.section(stage, name) for name in config.entries(stage)}
        found[f"options {path.stem} {stage}"] = digest(sections)
        if stage == "train":
            of = {name: identity(TrainOptions.model_validate(s), None) for name, s in sections.items()}
            found[f"identity {path.stem}"] = digest(of)
print(json.dumps(found))
"""


def _shards(checkout: Path, work: Path) -> dict[str, str]:
    files = [
        work / "cells/a.h5ad",
        work / "cells/b.h5ad",
        *sorted((work / "shards").rglob("*.h5ad")),
    ]
    assert len(files) > 3
    digests = json.loads(_python(checkout, _DIGESTS, *files))
    lines = (work / "vocabulary.tsv").read_text()
    names = [str(path.relative_to(work)) for path in files]
    return {f"file {name}": digest for name, digest in zip(names, digests)} | {
        "vocabulary": _digest(lines)
    }


def _batches(checkout: Path, work: Path) -> dict[str, str]:
    words = [work / "shards/manifest.json", json.dumps(STREAMS), json.dumps(SHARED["stream"])]
    return {
        f"batches {name}": digest
        for name, digest in json.loads(_python(checkout, _STREAMS, *words)).items()
    }


def _options(checkout: Path, work: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(_python(checkout, _OPTIONS))
    return found


def _curves(checkout: Path, work: Path) -> dict[str, str]:
    cases = {name: (name, {}) for name in MODELS}
    for layout, name in product(LAYOUTS, IN_LAYOUTS):
        cases[f"{name}, {layout}"] = (name, LAYOUTS[layout])
    curves = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        lines = pool.map(lambda item: _trained(checkout, work, item[0], *item[1]), cases.items())
        for name, found in zip(cases, lines):
            for kind, value in found.items():
                curves[f"{kind} {name}"] = value
    return curves


def _trained(
    checkout: Path, work: Path, case: str, name: str, layout: dict[str, Any]
) -> dict[str, str]:
    """Digests of the curve of a short training, and of its exported weights; what it says if it is
    refused.
    """
    options = {"tokens": {"max_tokens": 40}, "parallel": layout, "train": TRAIN, **SHARED}
    for section, values in MODELS[name].items():
        options[section] = options.get(section, {}) | values
    out = work / "runs" / case.replace(" ", "-").replace(",", "")
    inputs = f"--manifest {work}/shards/manifest.json --vocabulary {work}/vocabulary.tsv"
    try:
        words = f"train {inputs} --out {out}/train --nproc-per-node {2 if layout else 1} --options"
        _cellmill(checkout, words, json.dumps(options))
    except subprocess.CalledProcessError as error:
        return {"curve": error.stderr.strip().splitlines()[-1]}
    kept = ("step", "loss", "grad_norm", "lr", "cells", "tokens")
    curve = []
    for text in (out / "train/metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        names = [key for key in line if key in kept or key.startswith(("loss_", "val_"))]
        curve.append({name: line[name] for name in names})
    _cellmill(
        checkout,
        f"consolidate --train {out}/train --vocabulary {work}/vocabulary.tsv --out {out}/model",
    )
    weights = (out / "model/model.safetensors").read_bytes()
    return {"curve": _digest(json.dumps(curve, sort_keys=True)), "weights": _digest(weights)}


def _demo(checkout: Path, work: Path) -> dict[str, str]:
    snakemake = [sys.executable, "-m", "snakemake", "--profile", "profiles/local"]
    _run(checkout, [*snakemake, "--quiet", "all"])
    again = _run(checkout, [*snakemake, "--dry-run"])
    run = checkout / "results/runs/demo"
    metrics = re.sub(r'"seconds": [\d.]+', "", next(run.rglob("metrics.json")).read_text())
    return {
        "demo, dry run": "nothing to do" if "Nothing to be done" in again else again[-500:],
        "demo, metrics": _digest(metrics),
        "demo, weights": _digest(next(run.rglob("model.safetensors")).read_bytes()),
    }


PARTS = {
    "shards": _shards,
    "batches": _batches,
    "options": _options,
    "curves": _curves,
    "demo": _demo,
}


def _digest(value: str | bytes) -> str:
    return hashlib.sha256(value.encode() if isinstance(value, str) else value).hexdigest()[:16]


def _cellmill(checkout: Path, words: str, *more: str) -> str:
    return _run(checkout, [sys.executable, "-m", "cellmill.cli", *words.split(), *more])


def _python(checkout: Path, script: str, *words: Any) -> str:
    return _run(checkout, [sys.executable, "-c", script, *map(str, words)])


def _run(checkout: Path, command: list[str]) -> str:
    """Output of a command with the cellmill of `checkout`, in that folder."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # no GPUs, without the flag for it, which earlier commits lack
    environment = os.environ | {
        "PYTHONPATH": str(checkout / "src"),
        "OMP_NUM_THREADS": "1",
        "PATH": path,
    }
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    done.check_returncode()
    return done.stdout


def _git(*words: str, cwd: Path | None = None) -> str:
    return subprocess.run(
        ["git", *words], cwd=cwd, check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    main()
