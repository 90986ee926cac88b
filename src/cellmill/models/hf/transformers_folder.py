"""A trained model of family hf as a folder that transformers' own `AutoModel.from_pretrained` reads.

    model.safetensors   weights under transformers' names, without the objective's heads
    tokens.tsv          id of each gene or residue; cells have their genes in the order of their tokens
    config.json         transformers' config; written last

A pooler, which nothing here trains, is not written: transformers draws one where the type has it.
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel

from cellmill.config.tokens import SPECIAL
from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import ConfigError, DataError
from cellmill.files import atomic_path
from cellmill.models.export import load_model
from cellmill.models.hf.padded_model import HfModel

FILES = ("model.safetensors", "tokens.tsv", "config.json")


def write_transformers(folder: Path, out: Path) -> None:
    """Write the model in `folder` to the folder `out`, after it was read back equal to the bit.

    Raises ConfigError for another family, and for an `out` that holds another model than such a folder; DataError if
    what was read back differs.
    """
    if (out / "vocabulary.tsv").exists():
        raise ConfigError(f"{out}: it holds a model of cellmill, whose files would be replaced; choose another --out")
    model, vocabulary, config = load_model(folder)
    if not isinstance(model, HfModel):
        raise ConfigError(
            f"{folder}: expected a model of family hf, got {config['family']}: transformers has no such type"
        )
    body = whole_model(model)
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        made = Path(temporary)
        body.save_pretrained(made, max_shard_size="1TB")
        (made / "tokens.tsv").write_text(_token_table(model, vocabulary))
        again = AutoModel.from_pretrained(made, use_safetensors=True, local_files_only=True).state_dict()
        if any(not torch.equal(tensor, again[name]) for name, tensor in body.state_dict().items()):
            raise DataError(f"{out}: not written: transformers reads other weights than were written")
        for name in FILES:
            with atomic_path(out / name) as path:
                os.replace(made / name, path)


def whole_model(model: HfModel) -> PreTrainedModel:
    """Return transformers' model with its blocks in their place again; `model` cannot be used afterwards."""
    blocks = model.blocks
    assert isinstance(blocks, nn.Module)
    model.body.set_submodule(model.blocks_path, blocks)
    return model.body


def _token_table(model: HfModel, vocabulary: Vocabulary) -> str:
    names = [*SPECIAL, *vocabulary.gene_ids]
    return "".join(f"{name}\t{number}\n" for name, number in [("token", "id"), *zip(names, model.ids.tolist())])
