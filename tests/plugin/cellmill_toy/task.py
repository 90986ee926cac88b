"""Mean length of the embeddings of scored cells, beside that of zeros."""

import numpy as np

from cellmill.evaluate.task import Context
from cellmill.runs.results import Row, Score, ScoredMethod, TaskResult
from cellmill_toy.options import ToyNorm


class Norm:
    """See the module."""

    def __init__(self, config: ToyNorm) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """One row for the model, one for zeros."""
        lengths = np.linalg.norm(context.vectors[context.scored], ord=self.config.power, axis=1)
        mean = float(lengths.mean())
        sd = float(lengths.std())
        rows = [
            Row(ScoredMethod("embedding", kind="model"), {"length": Score(mean, sd)}),
            Row(ScoredMethod("zeros"), {"length": Score(0.0, 0.0)}),
        ]
        return TaskResult(rows=rows, metric="length")
