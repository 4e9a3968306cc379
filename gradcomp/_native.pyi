"""The compiled module, without its kernels: `gradcomp.kernels.dispatch` calls those, by the names of their definitions.

A table is an array of rows of bytes there; `tests/kernels/test_signatures.py` compares all arguments.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

class ShmOperation:
    def state(self) -> int:
        """0 while under way, 1 when complete, 2 when failed."""

class ShmRank:
    """One rank of a shared-memory transport; gradcomp/transport/shm.py says how it is used."""

    @staticmethod
    def create(size: int, ring_bytes: int) -> ShmRank: ...
    @staticmethod
    def attach(location: tuple[int, int, int, int], rank: int, size: int, ring_bytes: int) -> ShmRank: ...
    def location(self) -> tuple[int, int, int, int]:
        """Process, its start, file descriptor and nonce of the segment, until the rank is started."""
    def start(self, processes: Sequence[tuple[int, int]]) -> None: ...
    def allreduce(self, array: npt.NDArray[np.float32] | npt.NDArray[np.float64]) -> ShmOperation: ...
    def alltoallv(
        self,
        send: npt.NDArray[np.uint8],
        send_counts: Sequence[int],
        recv: npt.NDArray[np.uint8],
        recv_counts: Sequence[int],
    ) -> ShmOperation: ...
    def allgatherv(self, buffer: npt.NDArray[np.uint8], counts: Sequence[int]) -> ShmOperation: ...
    def exchange(
        self,
        send_ranks: Sequence[int],
        sends: Sequence[npt.NDArray[np.uint8]],
        recv_ranks: Sequence[int],
        recvs: Sequence[npt.NDArray[np.uint8]],
    ) -> ShmOperation: ...
    def help(self) -> None:
        """Move the little that can be moved at once."""

    def failure(self) -> str: ...
    def abandon(self) -> None: ...
    def close(self) -> None: ...

def shm_process() -> tuple[int, int]:
    """This process's number and when it started."""

def shm_bytes(size: int, ring_bytes: int) -> int:
    """Bytes of memory that a segment takes."""

def sources_digest() -> str:
    """What `gradcomp.kernels.dispatch.digest` gave of the sources that this was built from."""

def isa() -> str:
    """The instruction set in use: "avx512", "avx2" or "baseline"."""

def set_isa(name: str) -> None:
    """Use another instruction set; ValueError if this CPU or build lacks it."""

def threads() -> int:
    """Most threads that share the work of a codec's kernel, the caller's included; 1 until it is set."""

def set_threads(number: int) -> None:
    """Let so many threads share the work; ValueError unless it is positive."""

def available_isas() -> list[str]:
    """The instruction sets of this build that this CPU has, fastest first."""
