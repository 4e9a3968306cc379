"""Jobs of two ranks for the tests under tests/gpu, where the compiled module may be missing."""

from __future__ import annotations

import importlib.util
from functools import partial

from batch import on_ranks

#: For ranks that have no GPU, and for what ranks do on the host.
HOST_KERNELS = {} if importlib.util.find_spec("gradcomp._native") else {"GRADCOMP_KERNELS": "reference"}

on_two_ranks = partial(on_ranks, 2, env=HOST_KERNELS)
