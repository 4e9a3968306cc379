"""Layers whose gradients have come are collected until the last one of an exchange bucket, and submitted together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from gradcomp.exchange.layout import Layout
from gradcomp.torch.modules import skipped

Hook = Callable[[torch.Tensor], None]


class Arrived:
    """Collects layers in hooks that autograd calls for every layer, so that the rest is done once for many layers.

    While ``is_on`` is true, a hook only notes its layer; else it calls ``first`` with it. ``bucket_complete`` is called
    when no further layer of an exchange bucket is missing. A layer in several buckets, or in none, counts as the last
    of its bucket. Both functions must be opaque, see :func:`gradcomp.torch.modules.opaque`.
    """

    def __init__(self, first: Callable[[int], None], bucket_complete: Callable[[], None]) -> None:
        self.is_on = False
        self._first, self._bucket_complete = first, bucket_complete
        self._layers: list[int] = []
        self._missing: list[int] = []
        self._bucket_of: list[int] = []

    def open(self, layout: Layout) -> None:
        """Begin a step, in which no layer has come."""
        self.is_on = False
        self._layers.clear()
        self._bucket_of = layout.bucket_of.tolist()
        self._missing = np.bincount(layout.bucket_of, minlength=len(layout.buckets) + 1).tolist()
        self._missing[-1] = 1

    def hook(self, layer: int) -> Hook:
        """Return a layer's hook."""
        first, bucket_complete, append = self._first, self._bucket_complete, self._layers.append

        # This runs for every layer in every step, and an opaque function takes several times as long. It calls only
        # opaque ones.
        def arrived(_: torch.Tensor) -> None:
            if not self.is_on:
                first(layer)
                return
            append(layer)
            missing, bucket = self._missing, self._bucket_of[layer]
            missing[bucket] -= 1
            if not missing[bucket]:
                bucket_complete()

        return skipped(arrived)

    def submitted(self, layer: int) -> None:
        """Count a layer that its hook has not noted, and that is submitted already."""
        self._missing[self._bucket_of[layer]] -= 1
        self._missing[-1] = 1

    def take(self) -> list[int]:
        """Return the layers that were noted since the last call, in their order."""
        layers = self._layers.copy()
        if layers:
            self._layers.clear()  # the hooks hold this list
            self._missing[-1] = 1
        return layers
