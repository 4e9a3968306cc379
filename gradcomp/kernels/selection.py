"""Sparse selections of whole layers, and random indices; `reference_*` define and document the kernels."""

from __future__ import annotations

from gradcomp.kernels import reference_adacomp
from gradcomp.kernels import reference_selection as reference
from gradcomp.kernels.dispatch import kernel
from gradcomp.kernels.philox import draw_indices as _definition

draw_indices = kernel(_definition)


contribute = kernel(reference.contribute)
squares = kernel(reference.squares)
select_top = kernel(reference.select_top)
select_above = kernel(reference.select_above)
select_adacomp = kernel(reference_adacomp.select_adacomp)
sample_thresholds = kernel(reference.sample_thresholds)
tail = kernel(reference.tail)
take = kernel(reference.take)
put = kernel(reference.put)
