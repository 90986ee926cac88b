"""embed: embeddings of the cells of any dataset, from the exported model alone."""

from pathlib import Path

from cellmill.config.options import EmbedOptions
from cellmill.data.fasta import open_dataset
from cellmill.errors import DataError
from cellmill.evaluate.embed import embed_cells, load_for_inference, write_embedding
from cellmill.files import sha256_file


def run(*, options: EmbedOptions, model: Path, input: Path, counts: str, out: Path) -> None:
    """Write obs and embeddings of the cells of `input`, preprocessed or raw, to `out` (.h5ad)."""
    network, vocabulary, tokens, _ = load_for_inference(model)
    with open_dataset(input, counts) as reader:
        embedding = embed_cells(reader, network, vocabulary, tokens, options.embed.token_budget)
        if embedding.coverage_frac < (least := options.embed.min_coverage_frac):
            raise DataError(
                f"{input}: {embedding.coverage_frac:.1%} of its counts fall on genes that the model knows, "
                f"embed.min_coverage_frac is {least:g}; use a model of these genes, or lower the threshold"
            )
        about = {
            "model_digest": sha256_file(model / "model.safetensors"),
            "vocabulary_digest": vocabulary.digest,
            "coverage_frac": embedding.coverage_frac,
            "n_without_genes": embedding.n_without_genes,
        }
        write_embedding(out, reader.obs, embedding.vectors, about)
    print(f"{input.stem}: {reader.n_obs:,} cells, {embedding.coverage_frac:.1%} of counts on known genes -> {out}")
    if n := embedding.n_without_genes:
        print(f"{input.stem}: {n:,} cells have no gene that the model knows: their rows are NaN")
