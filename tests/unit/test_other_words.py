"""Words of other tools in a configuration are answered with the option that does it here, which exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cellmill.config.load import check_config
from cellmill.config.section import other_words
from cellmill.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def _error(**sections: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check_config({"corpora": {"a": {}}, "runs": {"r": {"corpus": "a"}}, **sections})
    return str(error.value)


def test_every_word_leads_to_an_option_that_the_documentation_has() -> None:
    text = (ROOT / "config" / "README.md").read_text(encoding="utf-8")
    for word, here in other_words("keys").items():
        assert "profile" in here or re.match(
            r"(train|stream|parallel|model|tokens|objective|finetune|shard)\.\w+", here
        ), word
        for section, key in re.findall(r"\b(train|stream|parallel|model|tokens|objective|finetune|shard)\.(\w+)", here):
            assert re.search(rf"`(?:{section}\.)?{key}`", text), f"{word}: no {section}.{key}"
    assert all(value in text for value in other_words("values").values())


def test_a_word_of_another_tool_is_answered_with_ours() -> None:
    assert "train: unknown key 'num_epochs'; set train.epochs" in _error(train={"num_epochs": 3})
    wrong = _error(train={"steps": 1}, finetune={"method": "full", "layer_lr_decay": 0.9})
    assert wrong.endswith("unknown key 'layer_lr_decay'; set finetune.layer_decay")
    wrong = _error(train={"steps": 1}, parallel={"sharding_strategy": "ZeRO-2"})
    assert wrong.endswith("or 'NO_SHARD', got 'ZeRO-2'; ZeRO-2 is SHARD_GRAD_OP here")
    assert "train: unknown key 'patience'; set train.early_stop_patience" in _error(train={"patience": 3})
    assert "'accumulate_grad_batches'; set train.global_batch" in _error(train={"accumulate_grad_batches": 4})
    wrong = _error(train={"steps": 1}, parallel={"schedule": "Interleaved"})
    assert wrong.endswith("got 'Interleaved'; Interleaved is Interleaved1F1B here")
    wrong = _error(train={"steps": 1, "optimizer": "adam"}, parallel={})
    assert wrong.endswith("unknown optimizer 'adam'; did you mean 'adamw'?")
