"""The exchanges that are worth comparing: DistributedDataParallel, its hooks, and gradcomp's choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["ddp", "gradcomp", "local"]


@dataclass(frozen=True)
class Choice:
    """One exchange.

    ``how``: the hook of DistributedDataParallel (empty, ``half`` or ``powersgd``), or the compression as an argument.
    A choice whose ``kind`` is "local" exchanges pseudo-gradients, once in many steps.
    ``memory``: bytes for each parameter beside parameters, gradients and the optimizer's state, as a rank on CPUs
    needed them at its peak (``docs/benchmarks/memory.md``, with DDP's hooks).
    ``alike``: the metric was within 1% of uncompressed training in all measured tasks under SGD
    (``docs/benchmarks/convergence.md``); the others need a check of the user's own.
    """

    key: str
    title: str
    kind: Kind
    how: str
    memory: float
    alike: bool = True


DDP = Choice("ddp", "DDP", "ddp", "", 6.3)
CHOICES = (
    DDP,
    Choice("ddp-half", "DDP, bf16 or fp16 hook", "ddp", "half", 10.5),
    Choice("ddp-powersgd", "DDP, PowerSGD hook, rank 4", "ddp", "powersgd", 25.8, alike=False),
    Choice("none", "gradcomp, none", "gradcomp", "none", 13.9),
    Choice("bf16", "gradcomp, bf16", "gradcomp", "bf16", 17.2),
    Choice("8bit", "gradcomp, 8 bits", "gradcomp", "quantize:bits=8", 10.3),
    Choice("4bit", "gradcomp, 4 bits", "gradcomp", "quantize:bits=4", 5.3),
    Choice("powersgd", "gradcomp, PowerSGD, rank 4", "gradcomp", "powersgd:rank=4", 11.2, alike=False),
    Choice("topk", "gradcomp, TopK 1%", "gradcomp", "topk:density=0.01", 13.9, alike=False),
)
#: Local steps: an anchor, a pseudo-gradient and DiLoCo's momentum, 4 bytes each, come to the memory of the compression.
LOCAL_CHOICES = (
    Choice("diloco", "DiLoCo", "local", "none", 25.9, alike=False),
    Choice("local-4bit", "LocalSteps", "local", "quantize:bits=4", 13.3, alike=False),
    Choice(
        "sparseloco",
        "SparseLoCo",
        "local",
        "chunked_topk:density=0.02,decay=0.95,values=[quantize:bits=2,bucket_size=64,rounding=nearest]",
        21.9,
        alike=False,
    ),
)
