"""embed: embeddings of the cells of any dataset, from the exported model alone."""

import time
from dataclasses import asdict
from pathlib import Path

from cellmill.config.options import EmbedOptions
from cellmill.data.dataset_file import local_input, open_dataset
from cellmill.data.h5_file import check_h5ad
from cellmill.errors import ConfigError
from cellmill.evaluate.embed import embed_cells, load_for_inference
from cellmill.evaluate.embedding_checks import check_coverage, limits_of
from cellmill.evaluate.embedding_file import append_embedding, write_embedding
from cellmill.files import sha256_file
from cellmill.train.telemetry import memory_bytes


def run(*, options: EmbedOptions, model: Path, input: Path | str, counts: str, out: Path, append: bool = False) -> None:
    """Write embeddings of the cells of `input`, preprocessed or raw, to `out` (.h5ad). `input` may be a URL.

    With them are obs and nothing else, or, with `append`, everything in the .h5ad `input`, which `out` may be.
    """
    path = checked_input(input, out, append)
    network, vocabulary, tokens, config = load_for_inference(model)
    section, started = options.embed, time.perf_counter()
    with open_dataset(path, counts) as reader:
        embedding = embed_cells(reader, network, vocabulary, tokens, section.token_budget, precision=section.precision)
        check_coverage(path, embedding, section)
        reader.warn_if_rounded()
        obs = reader.obs
    seconds = time.perf_counter() - started
    about = {
        "model_digest": sha256_file(model / "model.safetensors"),
        "vocabulary_digest": vocabulary.digest,
        "supervised_by": ", ".join(config.get("supervised_by", [])),  # obs columns whose labels it was trained with
        "precision": section.precision,
        "coverage_frac": embedding.coverage_frac,
        "n_without_genes": embedding.n_without_genes,
        "genes": asdict(embedding.genes) | {"absent": list(embedding.genes.absent)},
        "seconds": seconds,
        "peak_gb": memory_bytes(next(network.parameters()).device)[0] / 1e9,
    }
    if append:
        append_embedding(path, out, embedding.vectors, about)
    else:
        write_embedding(out, obs, embedding.vectors, about)
    print(f"{path.stem}: {len(obs):,} cells, {embedding.coverage_frac:.1%} of counts on known genes -> {out}")
    print(f"{path.stem}: {seconds:.1f} s, {len(obs) / seconds:,.0f} cells/s, peak memory {about['peak_gb']:.2f} GB")
    for line in limits_of(embedding):
        print(f"{path.stem}: {line}")


def checked_input(input: Path | str, out: Path, append: bool) -> Path:
    """Return where `input` is on this machine. Raises ConfigError if `out` cannot be written, or nothing appended."""
    check_h5ad(out, "--out")
    path = local_input(input)
    if not append and out.resolve() == path.resolve():
        raise ConfigError(f"--out {out} is --input; add --append to keep all that is in it")
    if append and path.suffix != ".h5ad":
        raise ConfigError(f"--append adds to an .h5ad, {input} is none; leave --append out")
    return path
