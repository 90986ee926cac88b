"""Tasks of cz-benchmarks on an embedding and on principal components, as plain arrays: nothing is downloaded.

Its tasks `Clustering` and `Embedding` and, with several batches, `Batch Integration` as they are; `Label Prediction`
with its own 5 folds of cells, its own classifiers and seed.
"""

import logging
import warnings

from missing import end_without

try:
    import numpy as np
    import pandas as pd
    from czbenchmarks.tasks import (
        BatchIntegrationTask,
        BatchIntegrationTaskInput,
        ClusteringTask,
        ClusteringTaskInput,
        EmbeddingTask,
        EmbeddingTaskInput,
        MetadataLabelPredictionTask,
        MetadataLabelPredictionTaskInput,
        MetricResult,
    )
    from embedded_cells import EmbeddedCells, judge
    from sklearn.exceptions import UndefinedMetricWarning
except ImportError as error:
    end_without("cz-benchmarks", "0.15.1", error)


def measure(vectors: np.ndarray, cells: EmbeddedCells) -> dict[str, float]:
    """Values by task, metric and, of label prediction, classifier."""
    labels, obs = pd.Series(cells.labels), pd.DataFrame({"label": cells.labels}, index=cells.names)
    tasks = [
        (ClusteringTask(), ClusteringTaskInput(obs=obs, input_labels=labels)),
        (EmbeddingTask(), EmbeddingTaskInput(input_labels=labels)),
        (MetadataLabelPredictionTask(), MetadataLabelPredictionTaskInput(labels=labels)),
    ]
    if cells.batches is not None:
        given = BatchIntegrationTaskInput(batch_labels=cells.batches, labels=cells.labels)
        tasks.append((BatchIntegrationTask(), given))
    found = {}
    for task, given in tasks:
        for result in task.run(cell_representation=vectors, task_input=given):
            found[_named(task.display_name, result)] = float(result.value)
    return found


def _named(task: str, result: MetricResult) -> str:
    """Task, metric and classifier of a value; `all` stands for the package's mean over classifiers."""
    classifier = result.params.get("classifier", "")
    words = [
        task,
        result.metric_type.value,
        "all" if classifier.startswith("MEAN(") else classifier,
    ]
    return ": ".join(filter(None, words))


if __name__ == "__main__":
    logging.getLogger("czbenchmarks").setLevel(logging.WARNING)
    warnings.simplefilter(
        "ignore", UndefinedMetricWarning
    )  # a class that a classifier never predicts: precision 0
    judge("cz-benchmarks", measure)
