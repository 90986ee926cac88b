"""Options of tasks without a classifier: clustering, batch integration and throughput. Torch-free."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cellmill.config.evaluate import TaskConfig
from cellmill.config.section import EachOnce

MIN_CELLS = Field(10, ge=2, description="Classes with fewer evaluated cells are skipped, by name.")


class ClusteringConfig(TaskConfig):
    """Leiden clustering of the embeddings against the label (extra `cluster`); skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.clustering:Clustering"
    reads_label: ClassVar[bool] = True

    name: Literal["clustering"] = Field("clustering", description="Name of the task.")
    neighbors: int = Field(15, ge=2, description="k of the neighbour graph.")
    resolution: float = Field(1.0, gt=0, description="Fixed Leiden resolution.")
    resolutions: Annotated[list[Annotated[float, Field(gt=0)]], EachOnce] = Field(
        [0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.4, 2.0],
        min_length=1,
        description="Leiden resolutions; the best one for each feature set is chosen with the label.",
    )
    seeds: int = Field(5, ge=1, description="Number of clusterings per resolution, with different seeds.")
    min_cells: int = MIN_CELLS

    def packages(self) -> dict[str, str]:
        return {"igraph": "cluster"}


class IntegrationConfig(TaskConfig):
    """Batch mixing and label separation of the embeddings, reported separately; skipped without a batch or a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.integration:Integration"
    reads_label: ClassVar[bool] = True

    name: Literal["integration"] = Field("integration", description="Name of the task.")
    neighbors: int = Field(90, ge=15, description="k of the neighbour graph; LISI's perplexity is a third of it.")
    harmony: bool = Field(False, description="Add a row for PCA50 corrected by Harmony (extra `integrate`).")
    min_cells: int = MIN_CELLS

    def packages(self) -> dict[str, str]:
        return {"harmonypy": "integrate"} if self.harmony else {}


class ThroughputConfig(TaskConfig):
    """Cells per second and peak memory of stage `embed` on the dataset, as it was run."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.throughput:Throughput"

    name: Literal["throughput"] = Field("throughput", description="Name of the task.")
