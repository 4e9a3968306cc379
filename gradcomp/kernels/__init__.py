"""One function per kernel: `reference` defines and documents them; the compiled backend is used where it was built.

The functions take a segment table (see `segments`) and serve a whole group per call.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from gradcomp.kernels import dispatch, reference, reference_bits, reference_checksum
from gradcomp.kernels.devices import Device
from gradcomp.kernels.dispatch import backend, use
from gradcomp.kernels.replayed_calls import DONE, Pending, Routine

__all__ = ["backend", "use"]  # names of other modules

encode = dispatch.kernel(reference.encode)
decode = dispatch.kernel(reference.decode)
decode_add = dispatch.kernel(reference.decode_add)
reduce = dispatch.kernel(reference.reduce)
nonzero = dispatch.kernel(reference.nonzero)
crc32c = dispatch.kernel(reference_checksum.crc32c)
sample = dispatch.kernel(reference_checksum.sample)
compact = dispatch.kernel(reference_bits.compact)
restore = dispatch.kernel(reference_bits.restore)


def together(device: Device, routine: Routine | None = None) -> AbstractContextManager[Pending]:
    """Collects the kernels that the block calls into one call on the device, started when the block ends.

    The block is given that call; results are in their arrays once it is finished. On the host each kernel runs at
    once.

    Args:
        device: where the kernels run.
        routine: the block's own, if it is entered in every step; the device then checks the tables only once.
    """
    if device.kernels is None:
        return nullcontext(DONE)
    found: AbstractContextManager[Pending] = device.kernels.together(routine)
    return found
