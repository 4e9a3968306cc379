"""Sparse selections of whole layers, and random indices, which `reference_selection` and `philox` define."""

from __future__ import annotations

from gradcomp.kernels import philox
from gradcomp.kernels import reference_selection as reference
from gradcomp.kernels.dispatch import kernel

draw_indices = kernel(philox.draw_indices)
contribute = kernel(reference.contribute)
squares = kernel(reference.squares)
select_top = kernel(reference.select_top)
select_above = kernel(reference.select_above)
select_adacomp = kernel(reference.select_adacomp)
sample_thresholds = kernel(reference.sample_thresholds)
tail = kernel(reference.tail)
take = kernel(reference.take)
put = kernel(reference.put)
