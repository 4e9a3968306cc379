"""The registry of :mod:`gradcomp.contrib`: the core names its features here, whose modules are imported on demand."""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: Features by their public names, and the module of each.
CONTRIB = {
    "LGC": "gradcomp.contrib.lgc.lgc",
    "PostMomentumSGD": "gradcomp.contrib.post_momentum",
    "begin_adasum_steps": "gradcomp.contrib.adasum_steps",
    "record_gradients": "gradcomp.contrib.record_gradients",
}
#: Those that are compressors, by the names of their string forms, and the fields that are their levels.
COMPRESSORS = {"lgc": ("LGC", "density")}


def contributed(name: str) -> Any:
    return getattr(import_module(CONTRIB[name]), name)
