"""The compiled kernels, on rows and vectors of bytes; `gradcomp.kernels.bodies` calls them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

def encode(
    codec: int,
    table: npt.NDArray[np.uint8],
    payload: npt.NDArray[np.uint8],
    flags: npt.NDArray[np.uint8],
    *,
    stochastic: bool,
    seed: int,
    step: int,
    rank: int,
    scale: float,
    decay: float,
    magnitudes: npt.NDArray[np.float32] | None = None,
) -> None: ...
def decode(
    codec: int,
    table: npt.NDArray[np.uint8],
    payload: npt.NDArray[np.uint8],
    flags: npt.NDArray[np.uint8],
    *,
    divisor: float,
    scale: float,
    magnitudes: npt.NDArray[np.float32] | None = None,
) -> None: ...
def decode_add(
    codec: int,
    table: npt.NDArray[np.uint8],
    payload: npt.NDArray[np.uint8],
    *,
    scale: float,
    magnitudes: npt.NDArray[np.float32] | None = None,
) -> None: ...
def reduce(
    codec: int,
    table: npt.NDArray[np.uint8],
    payloads: Sequence[npt.NDArray[np.uint8]],
    out: npt.NDArray[np.uint8],
    flags: npt.NDArray[np.uint8],
    *,
    stochastic: bool,
    seed: int,
    step: int,
    divisor: float,
    decay: float,
    rank: int = 4294967295,
    magnitudes: npt.NDArray[np.float32] | None = None,
) -> None: ...
def nonzero(table: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None: ...
def crc32c(data: npt.NDArray[np.uint8], value: int = 0) -> int: ...
def encode_indices(
    codings: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    indices: npt.NDArray[np.uint32],
    places: npt.NDArray[np.int64],
    payload: npt.NDArray[np.uint8],
) -> None: ...
def decode_indices(
    codings: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    indices: npt.NDArray[np.uint32],
    places: npt.NDArray[np.int64],
    payload: npt.NDArray[np.uint8],
) -> None: ...
def scatter_mean(
    table: npt.NDArray[np.uint8],
    flags: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    indices: npt.NDArray[np.uint32],
    values: npt.NDArray[np.float32],
    *,
    divisor: float,
    scale: float,
) -> None: ...
def contribute(
    table: npt.NDArray[np.uint8],
    flags: npt.NDArray[np.uint8],
    factors: npt.NDArray[np.float32],
    *,
    decay: float,
) -> None: ...
def squares(table: npt.NDArray[np.uint8], out: npt.NDArray[np.float64]) -> None: ...
def select_top(
    table: npt.NDArray[np.uint8],
    flags: npt.NDArray[np.uint8],
    factors: npt.NDArray[np.float32],
    counts: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    indices: npt.NDArray[np.uint32],
    values: npt.NDArray[np.float32],
    *,
    decay: float,
) -> None: ...
def select_above(
    table: npt.NDArray[np.uint8],
    thresholds: npt.NDArray[np.float32],
    limits: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    indices: npt.NDArray[np.uint32],
    values: npt.NDArray[np.float32],
    found: npt.NDArray[np.int64],
) -> None: ...
def sample_thresholds(
    table: npt.NDArray[np.uint8],
    counts: npt.NDArray[np.int64],
    thresholds: npt.NDArray[np.float32],
    *,
    stride: int,
    phase: int,
) -> None: ...
def tail(
    table: npt.NDArray[np.uint8],
    thresholds: npt.NDArray[np.float32],
    counts: npt.NDArray[np.int64],
    sums: npt.NDArray[np.float64],
    squares_out: npt.NDArray[np.float64],
    maxima: npt.NDArray[np.float32],
) -> None: ...
def take(
    table: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    indices: npt.NDArray[np.uint32],
    values: npt.NDArray[np.float32],
) -> None: ...
def put(
    table: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    indices: npt.NDArray[np.uint32],
    values: npt.NDArray[np.float32],
) -> None: ...
def select_adacomp(
    table: npt.NDArray[np.uint8],
    factors: npt.NDArray[np.float32],
    limits: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    indices: npt.NDArray[np.uint32],
    values: npt.NDArray[np.float32],
    found: npt.NDArray[np.int64],
    *,
    bin_size: int,
) -> None: ...
def project(
    table: npt.NDArray[np.uint8],
    flags: npt.NDArray[np.uint8],
    factors: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
    ranks: npt.NDArray[np.int64],
    q: npt.NDArray[np.float32],
    q_at: npt.NDArray[np.int64],
    p: npt.NDArray[np.float32],
    p_at: npt.NDArray[np.int64],
    *,
    decay: float,
) -> None: ...
def back_project(
    table: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
    ranks: npt.NDArray[np.int64],
    p: npt.NDArray[np.float32],
    p_at: npt.NDArray[np.int64],
    q: npt.NDArray[np.float32],
    q_at: npt.NDArray[np.int64],
) -> None: ...
def orthogonalise(
    rows: npt.NDArray[np.int64],
    ranks: npt.NDArray[np.int64],
    p: npt.NDArray[np.float32],
    p_at: npt.NDArray[np.int64],
) -> None: ...
def expand(
    table: npt.NDArray[np.uint8],
    flags: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
    ranks: npt.NDArray[np.int64],
    p: npt.NDArray[np.float32],
    p_at: npt.NDArray[np.int64],
    q: npt.NDArray[np.float32],
    q_at: npt.NDArray[np.int64],
    *,
    divisor: float,
    scale: float,
) -> None: ...
def subtract(
    table: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
    ranks: npt.NDArray[np.int64],
    p: npt.NDArray[np.float32],
    p_at: npt.NDArray[np.int64],
    q: npt.NDArray[np.float32],
    q_at: npt.NDArray[np.int64],
) -> None: ...
def draw_indices(
    lengths: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    layers: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    indices: npt.NDArray[np.uint32],
    *,
    seed: int,
    step: int,
    rank: int,
) -> None: ...
def cheapest(
    steps: npt.NDArray[np.int32],
    costs: npt.NDArray[np.float64],
    chosen: npt.NDArray[np.int32],
    *,
    budget: int,
) -> bool: ...

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

def isa() -> str:
    """The instruction set in use: "avx512", "avx2" or "baseline"."""

def set_isa(name: str) -> None:
    """Use another instruction set; ValueError if this CPU or build lacks it."""

def available_isas() -> list[str]:
    """The instruction sets of this build that this CPU has, fastest first."""
