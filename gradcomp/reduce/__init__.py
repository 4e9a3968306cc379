"""Reductions: schemes that sum, over ranks, codes that cannot be added."""

# ruff: noqa: I001 - among equals, the first that is registered is preferred
from gradcomp.reduce.base import Binding, Part, Reduction
from gradcomp.reduce.registry import make, register
from gradcomp.reduce.sra import ScatterReduceAllgather
from gradcomp.reduce.ring import Ring
from gradcomp.reduce.tree import Tree
from gradcomp.reduce.all_to_all import AllToAllBroadcast
from gradcomp.reduce.gather import GatherAndSum
from gradcomp.reduce.parameter_server import ParameterServer
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
