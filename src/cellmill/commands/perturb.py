"""perturb: predicted response of the control cells of a file to perturbations."""

from collections.abc import Sequence
from pathlib import Path

from cellmill.config.datasets import CountsRule
from cellmill.config.options import EmbedOptions
from cellmill.data.inputs.formats import open_dataset
from cellmill.data.inputs.h5 import create_h5, write_anndata
from cellmill.evaluate.inference.embed import load_for_inference
from cellmill.evaluate.inference.files import check_input
from cellmill.evaluate.inference.perturb.predict import ABOUT_RESPONSE, predict_response
from cellmill.evaluate.inference.perturb.screen import PerturbRequest


def perturb(
    *,
    options: EmbedOptions,
    model: Path,
    input: Path | str,
    counts: str,
    out: Path,
    perturbations: Sequence[str] | None,
    perturbation_column: str | None,
    control: str | None,
    by: str | None,
    counts_rule: CountsRule = "refuse",
    gene_column: str | None = None,
) -> None:
    """Write the response of the controls of `input` to `perturbations` to `out` (.h5ad).

    Raise UserError if the model predicts no responses, or the file has no controls.
    """
    path = check_input(input, out)
    loaded = load_for_inference(model)
    request = PerturbRequest(perturbations, perturbation_column, control, by)
    with open_dataset(path, counts, counts_rule, gene_column) as reader:
        response, lines = predict_response(reader, loaded, model, request, options.embed)
    with create_h5(out) as file:
        write_anndata(file, response)
    about = response.uns[ABOUT_RESPONSE]
    strata = f", by {' and '.join(about['strata'])}" if about["strata"] else ""
    n_perturbations = response.obs["perturbation"].nunique()
    print(
        f"{path.stem}: response of {response.n_vars:,} genes to {n_perturbations:,} perturbations, predicted "
        f"from {about['n_controls']:,} controls{strata} -> {out}"
    )
    for line in [*about["comparison"], *lines]:
        print(f"{path.stem}: {line}")
