"""Reductions: schemes that sum, over ranks, codes that cannot be added."""

from gradcomp.reduce.all_to_all import AllToAllBroadcast
from gradcomp.reduce.base import Binding, Part, Reduction
from gradcomp.reduce.gather import GatherAndSum
from gradcomp.reduce.hierarchical import Hierarchical
from gradcomp.reduce.parameter_server import ParameterServer
from gradcomp.reduce.registry import make
from gradcomp.reduce.ring import Ring
from gradcomp.reduce.sra import ScatterReduceAllgather
from gradcomp.reduce.tree import Tree

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
]
