"""Harmony by harmonypy, of the extra `integrate`: the correction of batches that an embedding has to stand beside."""

import importlib
from typing import Any

import numpy as np
import pandas as pd

from cellmill.errors import ConfigError


def import_harmonypy() -> Any:
    """harmonypy. Raises ConfigError if the extra is not installed."""
    try:
        return importlib.import_module("harmonypy")
    except ImportError:
        raise ConfigError(
            "evaluate.tasks.integration.harmony requires harmonypy, which is missing: pip install 'cellmill[integrate]'"
        ) from None


def corrected(components: np.ndarray, batches: np.ndarray, seed: int) -> np.ndarray:
    """`components` `(cells, width)` after Harmony with its own defaults (Korsunsky et al. 2019), float64."""
    frame = pd.DataFrame({"batch": batches.astype(str)})
    done = import_harmonypy().run_harmony(components, frame, "batch", verbose=False, random_state=seed, ncores=1)
    made = np.asarray(done.Z_corr, np.float64)
    return made if made.shape == components.shape else made.T
