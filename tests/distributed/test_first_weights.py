"""Each rank reads of `init_from` what it keeps, and starts from the values that a whole model has, in every layout."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conformance import LAYOUTS, PIPELINES, PP, TP
from tests.distributed.conftest import options
from tests.distributed.first_weights import export
from tests.distributed.pool import Pool
from tests.tiers import quick

CUT = ["FULL_SHARD", "HYBRID_SHARD", "tp 4", TP, PP]


def _options(layout: str) -> dict[str, Any]:
    return options((LAYOUTS | PIPELINES)[layout], model={"objective": "masked_gene"})


@pytest.mark.parametrize("layout", quick(CUT, [TP, PP]))
def test_a_rank_reads_its_own_part_and_gets_the_values_of_a_whole_model(
    pool: Pool, tmp_path: Path, layout: str
) -> None:
    export(_options(layout), tmp_path)
    found = pool.run("first_weights.first_weights", options=_options(layout), folder=str(tmp_path))
    for rank in found:
        assert rank["differing"] == []
        assert 0.6 * rank["kept"] < rank["read"] <= rank["kept"]
    if layout == "FULL_SHARD":
        assert sum(rank["read"] for rank in found) <= found[0]["all"], "the ranks together read the model once"


@pytest.mark.parametrize("layout", quick(["FULL_SHARD", TP, PP], ["FULL_SHARD"]))
def test_new_genes_begin_as_the_mean_row_in_every_layout_and_rank_0_alone_reads_for_it(
    pool: Pool, tmp_path: Path, layout: str
) -> None:
    given = _options(layout) | {"finetune": {"new_genes": "mean"}}
    export(given, tmp_path)
    found = pool.run("first_weights.first_weights", options=given, folder=str(tmp_path))
    for rank in found:
        assert rank["differing"] == []
    assert all(rank["read"] <= rank["kept"] for rank in found[1:])
