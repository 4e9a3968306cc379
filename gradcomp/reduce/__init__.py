"""Reductions sum compressed gradients over ranks by messages of their own: codes cannot be added as they are."""

# ruff: noqa: I001 - the order of registration matters: among reductions of equal cost `auto` takes the first
from gradcomp.reduce.base import Binding, Part, Reduction, make, register
from gradcomp.reduce.sra import ScatterReduceAllgather
from gradcomp.reduce.sums import Ring, Tree
from gradcomp.reduce.gather import AllToAllBroadcast, GatherAndSum, ParameterServer
from gradcomp.reduce.hierarchical import Hierarchical

__all__ = [
    "AllToAllBroadcast",
    "Binding",
    "GatherAndSum",
    "Hierarchical",
    "ParameterServer",
    "Part",
    "Reduction",
    "Ring",
    "ScatterReduceAllgather",
    "Tree",
    "make",
    "register",
]
