"""hf: a model of the transformers library, run on packed batches and written for `from_pretrained`.

The blocks of its main ModuleList move to `blocks`, which layouts shard and recompute one by one. A
`Passage` replaces each, so the code before and after the blocks remains transformers' own. `begin`
runs the model until it calls the last passage; each keeps the arguments for its block, since layers
may differ in mask and positions. `norm_output` runs it again: the last passage then returns the output
of the last block, and the code after the blocks follows.

transformers has no packed attention that all models share, so cells are padded to the longest of
the micro-batch. The head of masked_gene has the form of the language-model head of BERT, RoBERTa
and ESM, and takes its weights if the folder has them. Only safetensors are read from folders, never
a pickle.

Legend: B cells, L tokens of the longest cell with its special tokens, T tokens without special
tokens, H width of the model, V size of the vocabulary.
"""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from cellmill.config.parts.families import HfConfig
from cellmill.config.parts.tokens import RESIDUES, SPECIAL, Tokens
from cellmill.data.stream.batch import Batch
from cellmill.errors import ConfigError, DataError
from cellmill.files import atomic_path
from cellmill.models.batch import EncoderBatch
from cellmill.models.cell_encoder import CellEncoder, mean_state
from cellmill.models.export import load_model
from cellmill.models.families.hf_weights import FolderWeights
from cellmill.models.family import ParallelPlan
from cellmill.models.initial import Fill, default_fill
from cellmill.models.objective import Objective

UNUSED = ("pooler", "contact_head")
"""Modules that no objective reads. They are removed: DistributedDataParallel refuses parameters without
a gradient.
"""
PAD = SPECIAL.index("<pad>")
FILES = ("model.safetensors", "tokens.tsv", "config.json")


def compute_buffers(config: Any) -> dict[str, Tensor]:
    """Compute every buffer of transformers' model, by name, on the CPU, without memory for parameters."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.to("meta")))

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        with torch.device("cpu"):
            return dict(AutoModel.from_config(config).named_buffers())
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _make_architecture(config: HfConfig, vocab_size: int, ids: dict[str, int] | None) -> Any:
    """Return transformers' config without dropout.

    Its token ids are the corpus's, unless `ids` has the model's own ids of residues.
    """
    options = dict(config.architecture or {})
    if ids is None:
        options |= {
            "pad_token_id": PAD,
            "mask_token_id": SPECIAL.index("<mask>"),
            "vocab_size": vocab_size,
            "bos_token_id": None,
            "eos_token_id": None,
        }
    kind = options.pop("model_type")
    try:
        architecture = AutoConfig.for_model(kind, **options)
    except ValueError as error:
        raise ConfigError(f"model.architecture: {' '.join(str(error).split())[:200]}") from None
    for name in dir(architecture):
        is_dropout = "dropout" in name or name.endswith("_pdrop")
        if is_dropout and isinstance(getattr(architecture, name), float):
            setattr(architecture, name, 0.0)
    architecture.use_cache = False
    if architecture.pad_token_id is None:
        architecture.pad_token_id = (ids or {}).get("pad", PAD)
    return architecture


class _Reached(Exception):
    """Raised by the last passage: the code before the blocks has run."""


class Passage(nn.Module):
    """Stand-in for a block in transformers' model, with the names, as of its layer type, that it has."""

    block_output: Tensor | None = None

    def __init__(self, block: nn.Module, calls: list[Any], n_blocks: int) -> None:
        super().__init__()
        vars(self).update((k, value) for k, value in vars(block).items() if isinstance(value, str))
        self.calls = calls
        self.n_blocks = n_blocks

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Append the arguments to `calls`. The last passage raises _Reached, or returns `block_output` once."""
        self.calls.append((x, args, kwargs))
        if len(self.calls) < self.n_blocks:
            return x
        if self.block_output is None:
            raise _Reached
        output = self.block_output
        self.block_output = None
        self.calls.clear()
        return output


class HfModel(CellEncoder):
    plan = ParallelPlan(blocks="blocks")
    input_ids: Tensor  # (V,) int64: transformers' id of each token of the vocabulary

    def __init__(
        self, config: HfConfig, n_genes: int, tokens: Tokens, objective: Objective
    ) -> None:
        super().__init__(objective)
        self.config = config
        vocab_size = n_genes + len(SPECIAL)
        ids = config.residue_ids if tokens.sequences else None
        architecture = _make_architecture(config, vocab_size, ids)
        with torch.device("meta"):
            body: PreTrainedModel = AutoModel.from_config(architecture)
        for name in UNUSED:
            if getattr(body, name, None) is not None:
                setattr(body, name, None)
        n_blocks = architecture.num_hidden_layers
        paths = []
        for path, module in body.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == n_blocks:
                paths.append(path)
        if not paths:
            raise ConfigError(
                f"model.family hf: {type(body).__name__} has no list of {n_blocks} blocks; set another"
            )
        self.blocks_path = paths[0]  # the outermost
        self.blocks = body.get_submodule(self.blocks_path)
        self.is_causal = any(
            getattr(module, "is_causal", False) for module in self.blocks.modules()
        )
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        """Arguments of each block, in the order of the blocks."""
        passages = nn.ModuleList(Passage(block, self.calls, n_blocks) for block in self.blocks)
        body.set_submodule(self.blocks_path, passages)
        self.body = body
        self.width = int(architecture.hidden_size)
        self.pad_id = architecture.pad_token_id
        self.begin_id = (ids or {}).get("begin")
        self.end_id = (ids or {}).get("end")
        id_by_token = list(range(vocab_size))
        if ids is not None:
            id_by_token = [ids[name] for name in ("pad", "mask", *RESIDUES)]
        self.ids = torch.tensor(id_by_token, dtype=torch.int64, device="cpu")  # of `input_ids`
        self.register_buffer(
            "input_ids", torch.empty(vocab_size, dtype=torch.int64), persistent=False
        )
        self.has_corpus_ids = ids is None
        table: Any = body.get_input_embeddings()
        if self.has_corpus_ids:
            names = [name for name, weight in body.named_parameters() if weight is table.weight]
            self.gene_rows = frozenset({f"body.{names[0]}"})
        self.norm = nn.Identity()  # transformers' norm is after the passage
        self.attach_heads(vocab_size)
        self.plan = replace(
            self.plan, tensor={}, begin=("body",), finish=("body", *self.plan.finish)
        )
        self._set_initial_values(architecture.initializer_range)

    @property
    def gene_embedding(self) -> SimpleNamespace:
        """A stand-in with `weight`, (V, H): the input embedding of each token of the vocabulary."""
        weight: Any = self.body.get_input_embeddings().weight
        return SimpleNamespace(weight=weight[self.input_ids])

    def begin(self, prepared: EncoderBatch) -> Tensor:
        """Return the input of the first block, (B, L, H)."""
        self._run_to_blocks(self._padded(prepared))
        return self.calls[0][0]

    def _run_to_blocks(self, inputs: dict[str, Any]) -> None:
        """Run the code before the blocks, which fills `calls`."""
        self.calls.clear()
        try:
            self.body(**inputs)
        except _Reached:
            return
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise self._unsupported(str(error)) from error
        n_blocks = self.body.config.num_hidden_layers
        raise self._unsupported(f"it calls {len(self.calls)} of {n_blocks} blocks")

    def through(self, x: Tensor, prepared: EncoderBatch) -> Tensor:
        if not self.calls:
            self.begin(prepared)
        for block, (_, args, kwargs) in zip(self.blocks, self.calls):
            x = block(x, *args, **kwargs)
            if not isinstance(x, Tensor):
                raise self._unsupported("a block returns more than its states")
        self.calls.clear()
        return x

    def _unsupported(self, reason: str) -> ConfigError:
        kind = self.body.config.model_type
        return ConfigError(
            f"model.family hf: model_type {kind} is not supported: {reason}; set another model.path"
        )

    def cell_vectors(self, states: Tensor, prepared: EncoderBatch) -> Tensor:
        """Average the states of each cell, (T, H) -> (B, H) float32; zeros for a cell without tokens."""
        return mean_state(states, prepared)

    def after_blocks(self) -> frozenset[str]:
        """Return also the paths of transformers' modules that are not called before the blocks."""
        called = set[nn.Module]()
        modules = {}
        hooks = []
        for path, module in self.body.named_modules():
            if [*module.parameters(recurse=False)]:
                modules[path] = module
                hook = module.register_forward_pre_hook(lambda module, _: called.add(module))
                hooks.append(hook)
        device = next(self.body.parameters()).device
        inputs = {"input_ids": torch.full((1, 1), 1, device=device)}
        if device.type == "meta" and self.is_causal:
            inputs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        with torch.no_grad():
            self._run_to_blocks(inputs)
        self.calls.clear()
        for hook in hooks:
            hook.remove()
        uncalled = {f"body.{path}" for path, module in modules.items() if module not in called}
        return super().after_blocks() | uncalled

    def norm_output(self, x: Tensor, prepared: EncoderBatch) -> Tensor:
        """Run the code after the blocks, (B, L, H) -> (T, H), and remove special tokens and padding.

        Embeddings and masks are computed again and discarded: a lookup, without a gradient.
        """
        passages: Any = self.body.get_submodule(self.blocks_path)
        passages[-1].block_output = x
        out = self.body(**self._padded(prepared)).last_hidden_state
        return out[prepared.token_cells, prepared.position + (self.begin_id is not None)]

    def _padded(self, prepared: EncoderBatch) -> dict[str, Any]:
        """Pad the cells: return `input_ids` (B, L) and, where needed, `attention_mask`.

        A batch without cells is one row of padding, which is never read.
        """
        lengths = prepared.lengths
        before = int(self.begin_id is not None)
        after = int(self.end_id is not None)
        rows = max(len(lengths), 1)
        device = prepared.token_ids.device
        longest = max(max(lengths, default=0) + before + after, 1)
        ids = torch.full((rows, longest), self.pad_id, dtype=torch.int64, device=device)
        ids[prepared.token_cells, prepared.position + before] = self.input_ids[prepared.token_ids]
        ends = torch.zeros(rows, dtype=torch.int64, device=device)
        ends[: len(lengths)] = prepared.cu_seqlens.diff() + before
        if self.begin_id is not None:
            ids[:, 0] = self.begin_id
        if self.end_id is not None:
            ids[torch.arange(rows, device=device), ends.clamp(max=longest - 1)] = self.end_id
        inputs: dict[str, Any] = {"input_ids": ids}
        if ids.is_meta and self.is_causal:
            # transformers reads positions and a mask of two dimensions on the host, but not a mask of
            # four dimensions
            inputs["attention_mask"] = torch.ones(
                rows, 1, longest, longest, dtype=torch.bool, device=device
            )
        elif len(set(lengths)) > 1:
            columns = torch.arange(longest, device=device)
            inputs["attention_mask"] = (columns < (ends + after)[:, None]).long()
        return inputs

    def _set_initial_values(self, std: float) -> None:
        """Give each module of transformers' model a method `initial_value` (`models.initial`).

        Buffers get the values of transformers' constructor.
        """
        folder = None
        if self.config.weights == "pretrained":
            folder = FolderWeights(self.config, self.body.base_model_prefix)
        buffers = compute_buffers(self.body.config)
        table = self.body.get_input_embeddings()

        def rule(module: nn.Module, path: str, name: str) -> Fill | None:
            full = f"{path}.{name}".removeprefix(".")
            if full in buffers:
                return lambda tensor, generator: tensor.copy_(buffers[full])
            if folder is None or (self.has_corpus_ids and module is table):
                return default_fill(module, name, std)
            return folder.fill(full)

        for prefix, module in self.named_modules():
            path = prefix.removeprefix("body.").removeprefix("body")
            root = prefix.split(".")[0]
            if root == "blocks":
                path = f"{self.blocks_path}{prefix.removeprefix('blocks')}"
            elif root != "body":
                continue
            module.initial_value = partial(rule, module, path)
        # a head of the folder predicts the folder's tokens
        self.pretrained = None if self.has_corpus_ids else folder
        has_head = hasattr(self, "gene_bias") and hasattr(self.body.config, "layer_norm_eps")
        if self.pretrained is not None and has_head:
            for path in ("head.0", "head.2"):
                module = self.get_submodule(path)
                module.initial_value = partial(self._head_rule, module, path)  # type: ignore[assignment]
            self.get_submodule("head.2").eps = self.body.config.layer_norm_eps

    def _head_rule(self, module: nn.Module, path: str, name: str) -> Fill | None:
        random = default_fill(module, name)
        assert self.pretrained is not None
        assert random is not None
        return self.pretrained.fill_head(f"{path}.{name}", random)

    def initial_value(self, name: str) -> Fill | None:
        """Fill `input_ids`, and the head's bias from the folder; otherwise as the objective says."""
        if name == "input_ids":
            return lambda tensor, generator: tensor.copy_(self.ids)
        random = super().initial_value(name)
        if name == "gene_bias" and self.pretrained is not None and random is not None:
            return self.pretrained.fill_head(name, random, self.ids)
        return random


def write_transformers(folder: Path, out: Path) -> None:
    """Write a model folder for transformers' `from_pretrained`, if it reads back equal to the bit.

    transformers must also compute the states of a cell that cellmill computes.

    Raise ConfigError or DataError.
    """
    if (out / "vocabulary.tsv").exists():
        raise ConfigError(
            f"{out}: it holds a model of cellmill, whose files would be replaced; choose another --out"
        )
    model, vocabulary, config = load_model(folder)
    if not isinstance(model, HfModel):
        raise ConfigError(
            f"{folder}: expected a model of family hf, got {config['family']}: transformers has no such type"
        )
    tokens = torch.arange(min(config["tokens"]["max_tokens"], 512))
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
    token_ids = tokens % len(vocabulary.gene_ids) + len(SPECIAL)
    cell = Batch(token_ids, tokens, ends, tokens[:1], lengths=[len(tokens)])
    prepared = EncoderBatch.from_batch(cell)
    with torch.no_grad():
        states = model.states(prepared)
    blocks = model.blocks
    body = model.body
    assert isinstance(blocks, nn.Module)
    body.set_submodule(model.blocks_path, blocks)
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        new = Path(temporary)
        body.save_pretrained(new, max_shard_size="1TB")
        rows = [("token", "id"), *zip([*SPECIAL, *vocabulary.gene_ids], model.ids.tolist())]
        (new / "tokens.tsv").write_text("".join(f"{name}\t{number}\n" for name, number in rows))
        read_back = AutoModel.from_pretrained(new, use_safetensors=True, local_files_only=True)
        read_state = read_back.state_dict()
        for name, tensor in body.state_dict().items():
            if not torch.equal(tensor, read_state[name]):
                raise DataError(
                    f"{out}: not written: transformers reads other weights than were written"
                )
        with torch.no_grad():
            theirs = read_back.eval()(**model._padded(prepared)).last_hidden_state[0]
        theirs = theirs[prepared.position + (model.begin_id is not None)]
        if not torch.allclose(theirs, states, rtol=1e-3, atol=1e-3):
            raise DataError(f"{out}: not written: transformers computes other states than cellmill")
        for name in FILES:
            with atomic_path(out / name) as path:
                os.replace(new / name, path)
