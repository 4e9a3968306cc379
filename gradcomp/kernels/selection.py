"""Sparse selections of whole layers; `reference_selection` and `reference_adacomp` define and document the kernels."""

from __future__ import annotations

from gradcomp.kernels import reference_adacomp
from gradcomp.kernels import reference_selection as reference
from gradcomp.kernels.bodies import kernel
from gradcomp.kernels.reference_selection import MAX_LAYER_ELEMENTS

__all__ = [
    "MAX_LAYER_ELEMENTS",
    "contribute",
    "put",
    "sample_thresholds",
    "select_above",
    "select_adacomp",
    "select_top",
    "squares",
    "tail",
    "take",
]

contribute = kernel(reference.contribute)
squares = kernel(reference.squares)
select_top = kernel(reference.select_top)
select_above = kernel(reference.select_above)
select_adacomp = kernel(reference_adacomp.select_adacomp)
sample_thresholds = kernel(reference.sample_thresholds)
tail = kernel(reference.tail)
take = kernel(reference.take)
put = kernel(reference.put)
