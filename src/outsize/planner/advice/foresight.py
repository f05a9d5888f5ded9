"""Says how sure the seconds of a plan are: how far predictions of its kind were from measured steps.

foresight.json has a row for each kind of training that was compared: the errors of benchmarks/foresight and
benchmarks/one-gpu on rows that no constant was set by; and the kinds of devices that were among them. The
first row that is about a plan's kind, nodes and precision counts; a row without nodes or precisions is about
all of them. Oracle: tests/unit/planner/advice/test_how_sure.py.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

from outsize.ir.cluster import Cluster
from outsize.ir.findings import Foresight, ModelKind, Nodes
from outsize.ir.graph import CONVOLUTIONS, ModelGraph
from outsize.ir.hardware.constants import DataFile
from outsize.ir.plan import Plan

# Where fewer of a model's weights are trained they are adapters.
FEW: Final = 0.1


@final
class _ErrorRow(NamedTuple):
    """Holds the mean and the worst error of some rows, None where nobody has said it."""

    kind: ModelKind
    nodes: list[Nodes]
    precisions: list[str]
    mean: float | None
    worst: float | None
    rows: int | None
    origin: str

    def is_about(self, kind: ModelKind, nodes: Nodes, precision: str) -> bool:
        """Returns whether the row is about such a training."""
        return (
            self.kind == kind
            and (not self.nodes or nodes in self.nodes)
            and (not self.precisions or precision in self.precisions)
        )


@final
class _DevicesRow(NamedTuple):
    """Names kinds of devices whose steps were compared, by the word before the first dash."""

    kinds: list[str]
    origin: str


_FILE: Final = DataFile.beside(__file__)
_ERRORS: Final = _FILE.rows("errors", _ErrorRow)
_COMPARED: Final = {kind for row in _FILE.rows("devices", _DevicesRow) for kind in row.kinds}


def foresight(plan: Plan, graph: ModelGraph, cluster: Cluster) -> Foresight | None:
    """Returns how sure the plan's seconds are; None where they are measured ones or of a CPU."""
    if plan.expected is None or plan.expected.source == "measured" or not cluster.devices[0].is_accelerator:
        return None
    kind, nodes, precision = kind_of(graph), _nodes(plan, cluster), plan.precision.removesuffix("-mixed")
    known = next((row for row in _ERRORS if row.is_about(kind, nodes, precision)), None)
    told = Foresight(kind=kind, nodes=nodes, precision=precision, compared=_is_compared(cluster))
    if known is None:
        return told
    figures = {"mean_error": known.mean, "worst_error": known.worst, "rows": known.rows}
    return told.model_copy(update={**figures, "source": str(_FILE.origins[known.origin])})


def kind_of(graph: ModelGraph) -> ModelKind:
    """Returns the kind of training, by what the model is made of."""
    if any(parameter.experts for parameter in graph.parameters):
        return "experts"
    trained = sum(p.count for p in graph.parameters if p.trainable)
    if 0 < trained < FEW * sum(p.count for p in graph.parameters):
        return "adapters"
    works = (work for unit in graph.units for work in unit.forward)
    return "images" if any(work.family in CONVOLUTIONS for work in works) else "dense"


def _nodes(plan: Plan, cluster: Cluster) -> Nodes:
    if plan.axes.world_size == 1:
        return "device"
    return "node" if cluster.node_of(plan.axes.world_size - 1) == 0 else "nodes"


def _is_compared(cluster: Cluster) -> bool:
    """Returns whether steps of all these kinds of devices were compared."""
    return {device.kind.split("-")[0] for device in cluster.devices} <= _COMPARED
