"""Reductions: schemes that sum, over ranks, codes that cannot be added."""

from gradcomp.reduce.base import Binding, Part, Reduction
from gradcomp.reduce.sra import ScatterReduceAllgather

__all__ = ["Binding", "Part", "Reduction", "ScatterReduceAllgather"]
