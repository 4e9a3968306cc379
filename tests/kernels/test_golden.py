"""The bytes on the wire, pinned: a change here is a change of the protocol.

`python tests/kernels/test_golden.py` writes the file anew, from the reference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels.backends import HOST, each_of
from kernels.groups import CODECS, Group, Segment, dtypes_of, levels_of

from gradcomp.kernels import reference, segments

GOLDEN = Path(__file__).parent / "golden" / "payloads.json"


def cases(*names: str) -> dict[str, tuple[Group, dict[str, Any]]]:
    """One small segment for every codec, level and rounding. The numbers come from a formula, not from a library."""
    found: dict[str, tuple[Group, dict[str, Any]]] = {}
    i = np.arange(43)
    gradient = ((i * i * 7 + i * 3) % 97 - 48).astype(np.float64) / 32
    residual = ((i * 5) % 11 - 5).astype(np.float32) / 64
    for name in names or CODECS:
        codec = CODECS[name]
        dtype = dtypes_of(codec)[0]
        for bits in levels_of(codec):
            for stochastic in (False, True) if codec in segments.STOCHASTIC else (False,):
                row = Segment(
                    gradient.astype(segments.DTYPES[dtype]),
                    residual,
                    bits=bits,
                    bucket_size=20,
                    start=13,
                    layer=0xDEADBEEF,
                    dtype=dtype,
                )
                options = {
                    "stochastic": stochastic,
                    "seed": 0x0123456789ABCDEF,
                    "step": 7,
                    "rank": 1,
                    "decay": 0.5,
                }
                key = f"{name}-{bits}-{'stochastic' if stochastic else 'nearest'}"
                found[key] = (Group(codec, [row], gap=0), options)
    return found


@each_of(HOST)
@pytest.mark.parametrize("codec", CODECS)
def test_payload(codec: str, backend: Any) -> None:
    golden = json.loads(GOLDEN.read_text())
    made = {
        key: group.encode(backend, **options).payload.hex() for key, (group, options) in cases(codec).items()
    }
    assert made == {
        key: payload for key, payload in golden.items() if key.rpartition("-")[0].rpartition("-")[0] == codec
    }
    assert made


if __name__ == "__main__":
    payloads = {
        key: group.encode(reference, **options).payload.hex() for key, (group, options) in cases().items()
    }
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(payloads, indent=1) + "\n")
