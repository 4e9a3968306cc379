"""What codecs launch is what modules are compiled for: no more, no less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.driver import CpuDriver
from kernels.groups import CODECS, Group, Segment, dtypes_of, levels_of
from kernels.standin import FOLDER

from gradcomp.kernels import segments
from gradcomp.kernels.cuda.codec import CodecKernels
from gradcomp.kernels.cuda.measures import MeasureKernels
from gradcomp.kernels.cuda.modules import Module, holding, modules
from gradcomp.kernels.cuda.prepared import Plans
from gradcomp.kernels.segments import Draw

LENGTH = 10_000


class Asking(CpuDriver):
    """Notes from which modules kernels come, and runs none."""

    def __init__(self) -> None:
        super().__init__(FOLDER)
        self.asked: set[Module] = set()

    def function(self, name: str, kernel: str, defines: Mapping[str, object]) -> Any:
        self.asked.add(holding(name, kernel, defines))

    def launch(self, function: Any, blocks: int, threads: int, parameters: np.ndarray) -> None:
        pass


def asked_by(codec: int) -> set[Module]:
    """By all kernels of a codec, at all levels, for buckets of whole groups, of some other size, and large ones."""
    driver = Asking()
    backend = CodecKernels(Plans(driver))
    levels = np.array(levels_of(codec), np.int32)
    gradient = np.zeros(LENGTH, segments.DTYPES[dtypes_of(codec)[0]])
    for size in (512, 3, 9001):
        rows = [
            Segment(gradient, bits=int(bits), bucket_size=size, dtype=dtypes_of(codec)[0]) for bits in levels
        ]
        group = Group(codec, rows)
        payload = bytes(group.size)
        for stochastic in (False, True):
            group.encode(backend, stochastic=stochastic)
            group.reduce(backend, [payload, payload], stochastic=stochastic)
            if size == 512:
                draw = Draw(0, 0, 0) if stochastic else None
                MeasureKernels(Plans(driver)).losses(
                    codec, group.table[:1], levels, draw=draw, magnitudes=group.magnitudes
                )
        group.decode(backend, payload)
        group.decode_add(backend, payload)
    return driver.asked


def test_codecs_launch_what_is_in_modules_and_all_of_it() -> None:
    codecs = [codec for codec in CODECS.values() if codec != segments.FP64]
    asked = set[Module]().union(*map(asked_by, codecs))
    sources = ("bits.cu", "encode.cu", "ranges.cu", "decode.cu", "losses.cu")
    coded = {each for each in modules() if each.source in sources}
    assert {each for each in asked if each.source != "rows.cu"} == coded


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_every_first_step_needs_few_modules(codec: int) -> None:
    driver = Asking()
    dtype = dtypes_of(codec)[0]
    group = Group(
        codec, [Segment(np.zeros(LENGTH, segments.DTYPES[dtype]), bits=max(levels_of(codec)), dtype=dtype)]
    )
    backend = CodecKernels(Plans(driver))
    group.encode(backend)
    group.reduce(backend, [bytes(group.size)])
    group.decode(backend, bytes(group.size))
    for_units = codec in segments.UNIT_BYTES
    assert len({each for each in driver.asked if each.source != "rows.cu"}) <= 3 + for_units
