"""Names of interchangeable parts by kind, and the options class behind each (`cellmill.config.plugin`).

Built-ins are listed by module path, so listing or checking a name imports nothing. An installed package adds its own
through the entry-point group `cellmill.<kind>`; it never replaces a built-in.
"""

import importlib
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, get_args

from cellmill.errors import ConfigError, did_you_mean

BUILT_IN: dict[str, dict[str, str]] = {
    "family": {
        "encoder": "cellmill.models.encoder.config:EncoderConfig",
        "autoencoder": "cellmill.models.autoencoder.config:AutoencoderConfig",
        "profile": "cellmill.models.profile.config:ProfileConfig",
        "autoregressive": "cellmill.models.autoregressive.config:AutoregressiveConfig",
        "bert": "cellmill.models.bert.config:BertFamilyConfig",
        "scgpt": "cellmill.models.scgpt.config:ScgptConfig",
        "hf": "cellmill.models.hf.config:HfConfig",
    },
    "objective": {
        "cell_decoding": "cellmill.models.objectives.decoding_config:CellDecodingConfig",
        "query_decoding": "cellmill.models.objectives.config:QueryDecodingConfig",
        "denoise": "cellmill.models.objectives.decoding_config:DenoiseConfig",
        "masked_value": "cellmill.models.objectives.config:MaskedValueConfig",
        "masked_gene": "cellmill.models.objectives.config:MaskedGeneConfig",
        "perturbation_response": "cellmill.models.objectives.response_config:PerturbationResponseConfig",
        "supervised_contrastive": "cellmill.models.objectives.contrastive_config:SupervisedContrastiveConfig",
        "classification": "cellmill.models.objectives.classification_config:ClassificationConfig",
        "regression": "cellmill.models.objectives.regression_config:RegressionConfig",
        "sum": "cellmill.models.objectives.sum_config:SumConfig",
        "next_gene": "cellmill.models.objectives.config:NextGeneConfig",
    },
    "tokenizer": {
        "rank": "cellmill.config.tokens:RankTokens",
        "binned": "cellmill.config.tokens:BinnedTokens",
        "continuous": "cellmill.config.tokens:ContinuousTokens",
        "sequence": "cellmill.config.tokens:SequenceTokens",
    },
    "task": {
        "probe": "cellmill.config.evaluate:ProbeConfig",
        "reconstruct": "cellmill.config.evaluate:ReconstructConfig",
        "few_shot": "cellmill.config.evaluate:FewShotConfig",
        "leave_out": "cellmill.config.evaluate:LeaveOutConfig",
        "transfer": "cellmill.config.transfer_task:TransferConfig",
        "low_depth": "cellmill.config.evaluate:LowDepthConfig",
        "missing_genes": "cellmill.config.evaluate:MissingGenesConfig",
        "clustering": "cellmill.config.structure_tasks:ClusteringConfig",
        "integration": "cellmill.config.structure_tasks:IntegrationConfig",
        "throughput": "cellmill.config.structure_tasks:ThroughputConfig",
        "perturbation": "cellmill.config.evaluate:PerturbationConfig",
        "imputation": "cellmill.config.gene_tasks:ImputationConfig",
        "gene_embedding": "cellmill.config.gene_tasks:GeneEmbeddingConfig",
        "grn": "cellmill.config.gene_tasks:GrnConfig",
    },
    "tracker": {
        "tensorboard": "cellmill.config.track:TensorboardConfig",
        "mlflow": "cellmill.config.track:MlflowConfig",
        "wandb": "cellmill.config.track:WandbConfig",
        "trackio": "cellmill.config.track:TrackioConfig",
        "comet": "cellmill.config.track:CometConfig",
        "langfuse": "cellmill.config.track:LangfuseConfig",
    },
    "observer": {},
    "method": {
        "full": "cellmill.config.finetune:FullConfig",
        "partial": "cellmill.config.finetune:PartialConfig",
        "head_only": "cellmill.config.finetune:HeadOnlyConfig",
        "lora": "cellmill.config.finetune:LoraConfig",
    },
}


def names(kind: str) -> list[str]:
    """Every available name of `kind`, built-ins first."""
    return [*BUILT_IN[kind], *(p.name for p in entry_points(group=f"cellmill.{kind}") if p.name not in BUILT_IN[kind])]


def load(kind: str, name: str, contract: Any = None) -> Any:
    """The options class called `name`.

    Raises ConfigError if no such name is built in or installed, if the package that has it cannot be imported, or if
    what it has does not fit `contract`, a class that `cellmill.config.plugin.Plugin` describes.
    """
    if name in BUILT_IN[kind]:
        return import_object(BUILT_IN[kind][name])
    found = {(p.value, _package(p)): p for p in entry_points(group=f"cellmill.{kind}") if p.name == name}
    if not found:
        raise ConfigError(f"unknown {kind} {name!r}; {did_you_mean(name, names(kind))}")
    if len(found) > 1:
        both = " and ".join(sorted(f"{value} of {package}" for value, package in found))
        raise ConfigError(f"{kind} {name!r} is in {both}; remove one of the packages")
    [((value, package), point)] = found.items()
    try:
        options = point.load()
        problem = _misfit(options, contract, name) if contract is not None else ""
    except (Exception, SystemExit) as error:  # of somebody else's package: the user has to know which
        problem = f"cannot be imported ({in_one_line(error)})"
    if problem:
        raise ConfigError(f"{kind} {name!r}: {value} of {package} {problem}; repair or remove the package")
    return options


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an installed package"


def _misfit(options: Any, contract: Any, name: str) -> str:
    """Reason why an installed object cannot be the options class of the choice `name`; empty if there is none."""
    if not isinstance(options, type) or not issubclass(options, contract) or options is contract:
        return f"is no subclass of {contract.__module__}.{contract.__name__}"
    field = options.model_fields[contract.key]  # type: ignore[attr-defined]
    if name not in get_args(field.annotation):
        return f"has options of another name: expected {contract.key}: Literal[{name!r}]"
    module, _, attribute = getattr(options, "implementation", "").partition(":")
    if not attribute:
        return "sets no `implementation`, expected 'package.module:Class'"
    if find_spec(module) is None:
        return f"has an implementation in {module}, which does not exist"
    return ""


def in_one_line(error: BaseException) -> str:
    """Type and text of an error of somebody else's code, in at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def import_object(path: str) -> Any:
    """The object at `package.module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
