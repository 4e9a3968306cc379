"""What kernels take of a device: enough of their blocks fit on a processor, and nothing is spilled to memory."""

from __future__ import annotations

import pytest
from kernels import nvrtc

from gradcomp.kernels.cuda.modules import holding
from gradcomp.kernels.cuda.resources import resources

ARCHITECTURE = 90

#: Of sources, classes of codecs and kernels that a step with a quantiser runs: registers that they may take.
BOUNDS = [
    ("encode.cu", "MinMax", "encode_nearest", 80),
    ("encode.cu", "MinMax", "encode_stochastic", 80),
    ("encode.cu", "MinMax", "reduce_nearest", 80),
    ("encode.cu", "MinMax", "reduce_stochastic", 80),
    ("encode.cu", "ShiftedMinMax", "encode_stochastic", 80),
    ("encode.cu", "ShiftedMinMax", "reduce_stochastic", 80),
    ("encode.cu", "Codebook<L2Norm,LargeTable>", "encode_stochastic", 80),
    ("encode.cu", "SignMagnitude<L2Norm>", "reduce_nearest", 128),
    ("encode.cu", "SignMagnitude<L2Norm>", "reduce_stochastic", 128),
    ("encode.cu", "Codebook<L2Norm,LargeTable>", "reduce_stochastic", 128),
    ("decode.cu", "MinMax", "decode", 80),
]


#: An encoder, a reduction by a codebook, a decoder: the others have most of their code in common with these.
BRIEFLY = (BOUNDS[1], BOUNDS[-2], BOUNDS[-1])


@pytest.mark.parametrize(
    ("source", "name", "kernel", "registers"),
    [pytest.param(*bound, marks=[] if bound in BRIEFLY else pytest.mark.full) for bound in BOUNDS],
)
def test_nothing_is_spilled(source: str, name: str, kernel: str, registers: int) -> None:
    found = resources(nvrtc.cubin(holding(source, kernel, {"GRADCOMP_CLASS": name}), ARCHITECTURE))[kernel]
    assert found.local_bytes == 0
    assert found.registers <= registers


@pytest.mark.parametrize(
    ("source", "kernel", "registers"),
    [("expand.cu", "expand", 128), ("scatter.cu", "scatter", 64), ("select.cu", "contribute_histogram", 64)],
)
def test_nothing_is_spilled_of_factors_and_selections(source: str, kernel: str, registers: int) -> None:
    found = resources(nvrtc.cubin(holding(source, kernel, {}), ARCHITECTURE))[kernel]
    assert found.local_bytes == 0
    assert found.registers <= registers


def test_memory_of_threads_and_of_blocks_is_counted() -> None:
    """What joins the parts of a bucket keeps a tree of their sums in memory of its threads; blocks share strips."""
    module = holding("ranges.cu", "join_parts", {"GRADCOMP_CLASS": "SignMagnitude<L2Norm>"})
    found = resources(nvrtc.cubin(module, ARCHITECTURE))
    assert set(found) == set(module.kernels)
    assert found["join_parts"].local_bytes >= 2 * 33 * 8  # two trees of 32 sums and a count
    for name in ("encode_parts", "reduce_parts"):
        assert found[name].local_bytes == 0
        assert found[name].shared_bytes >= 16 * 144 * 4  # a strip for each half warp
    assert all(16 <= each.registers <= 128 for each in found.values())
