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
    ("encode.cu", "MinMax", "encode_stochastic", 128),
    ("encode.cu", "MinMax", "reduce_nearest", 128),
    ("encode.cu", "MinMax", "reduce_stochastic", 128),
    ("encode.cu", "SignMagnitude<L2Norm>", "reduce_nearest", 128),
    ("encode.cu", "SignMagnitude<L2Norm>", "reduce_stochastic", 128),
    ("encode.cu", "Codebook<L2Norm,LargeTable>", "reduce_stochastic", 128),
    ("decode.cu", "MinMax", "decode", 64),
]


#: An encoder, a reduction by a codebook, a decoder: the others have most of their code in common with these.
BRIEFLY = (BOUNDS[0], BOUNDS[6], BOUNDS[7])


@pytest.mark.parametrize(
    ("source", "name", "kernel", "registers"),
    [pytest.param(*bound, marks=[] if bound in BRIEFLY else pytest.mark.full) for bound in BOUNDS],
)
def test_nothing_is_spilled(source: str, name: str, kernel: str, registers: int) -> None:
    found = resources(nvrtc.cubin(holding(source, kernel, {"GRADCOMP_CLASS": name}), ARCHITECTURE))[kernel]
    assert found.local_bytes == 0
    assert found.registers <= registers


def test_memory_of_threads_and_of_blocks_is_counted() -> None:
    """A block that reads a bucket of any size keeps the sums of its chunks in memory of its threads."""
    module = holding(
        "encode.cu", "encode_ranges", {"GRADCOMP_CLASS": "SignMagnitude<L2Norm>", "GRADCOMP_TEAM": 256}
    )
    found = resources(nvrtc.cubin(module, ARCHITECTURE))
    assert set(found) == set(module.kernels)
    for each in found.values():
        assert each.local_bytes >= 2 * 33 * 8  # two trees of 32 sums and a count
        assert each.shared_bytes >= 16 * 144 * 4  # a strip for each half warp
        assert 32 <= each.registers <= 128
