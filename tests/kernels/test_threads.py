"""Threads that share a kernel's work change nothing but the time: results, flags and payloads have the same bytes."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels.groups import CODECS, Group, Result, Segment, dtypes_of, nearest_level
from kernels.isas import COMPILED, NATIVE, available_isas, instruction_set

from gradcomp.kernels import dispatch, segments

pytestmark = pytest.mark.skipif(not COMPILED, reason="needs the compiled module")

CODEC = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
THREADS = (2, 3, 5)
LEAST = 1 << 16
"""Elements that are worth a thread, see native/parts.cpp."""


@contextmanager
def shared_by(threads: int) -> Iterator[None]:
    before = dispatch.threads()
    dispatch.set_threads(threads)
    try:
        yield
    finally:
        dispatch.set_threads(before)


@pytest.fixture(params=available_isas() or ["none"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with instruction_set(request.param):
        yield request.param


def segment(codec: int, length: int, bucket_size: int, **given: Any) -> Segment:
    """A segment with a residual, whose buckets have scales of their own."""
    rng = np.random.default_rng(length)
    dtype = given.pop("dtype", dtypes_of(codec)[0])
    values = rng.standard_normal(length, np.float32) * np.exp(np.sin(np.arange(length) / 1000))
    return Segment(
        values.astype(segments.DTYPES[dtype]),
        rng.standard_normal(length, np.float32),
        bits=nearest_level(codec, given.pop("bits", 3)),
        bucket_size=bucket_size,
        next_residual=True,
        dtype=dtype,
        **given,
    )


@functools.cache
def mixed(codec: int) -> Group:
    """Long and short segments of all kinds, in an order in which shares end within, between and behind them."""
    empty = segment(codec, 0, 512)
    dtypes = dtypes_of(codec)
    spoiled = segment(codec, 2 * LEAST + 77, 512, bits=4)
    spoiled.gradient[LEAST + 10_000] = np.nan
    return Group(
        codec,
        [
            empty,
            segment(codec, 3 * LEAST + 1001, 512, start=5, layer=7),
            *(segment(codec, length, 8, layer=length) for length in range(1, 300, 2)),
            segment(codec, LEAST + 3001, 3, bits=8, dtype=dtypes[-1], layer=9),
            empty,
            spoiled,
            segment(codec, 2 * LEAST + 1, 1000, bits=1, dtype=dtypes[-2 % len(dtypes)], start=64),
            segment(codec, 2 * LEAST + 5, 1 << 20, bits=5),  # a single bucket
            empty,
        ],
    )


def encodings(group: Group) -> list[Result]:
    return [group.encode(NATIVE, stochastic=stochastic, decay=0.9) for stochastic in (False, True)]


def reductions(group: Group, payloads: list[bytes]) -> list[Result]:
    return [group.reduce(NATIVE, payloads, stochastic=stochastic) for stochastic in (False, True)]


def decodings(group: Group, payload: bytes, flags: list[int]) -> list[Result]:
    found = [group.decode(NATIVE, payload, flags, divisor=3.0, scale=0.7)]
    return found if group.codec == segments.FP64 else [*found, group.decode_add(NATIVE, payload, scale=0.3)]


@CODEC
def test_every_kernel_writes_the_same_bytes(codec: int, isa: str) -> None:
    group = mixed(codec)
    flags = [0] * len(group.rows)
    flags[1] = 1  # this output becomes NaN
    alone = encodings(group)
    payloads = [result.payload for result in alone]
    of_one = [*alone, *reductions(group, payloads), *decodings(group, payloads[0], flags)]
    assert [sum(result.flags) for result in alone] == [1, 1]
    for threads in THREADS:
        with shared_by(threads):
            assert [
                *encodings(group),
                *reductions(group, payloads),
                *decodings(group, payloads[0], flags),
            ] == of_one


@CODEC
@pytest.mark.parametrize("bucket_size", [1, 3, 64, 100, 512, 70_000])
def test_lengths_around_the_borders_of_parts(codec: int, bucket_size: int) -> None:
    for more in (-65, -1, 0, 1, 64, bucket_size - 1, bucket_size + 1):
        group = Group(codec, [segment(codec, 2 * LEAST + more, bucket_size, start=3)])
        encoded = group.encode(NATIVE, stochastic=True)
        decoded = decodings(group, encoded.payload, [0])
        for threads in THREADS[:2]:
            with shared_by(threads):
                assert group.encode(NATIVE, stochastic=True) == encoded
                assert decodings(group, encoded.payload, [0]) == decoded


@CODEC
def test_payloads_that_no_encoder_wrote(codec: int) -> None:
    group = mixed(codec)
    hostile = np.random.default_rng(0).integers(0, 256, group.size, np.uint8).tobytes()
    flags = [0] * len(group.rows)
    decoded = decodings(group, hostile, flags)
    reduced = reductions(group, [hostile, hostile])
    assert any(decoded[0].flags)
    for threads in THREADS:
        with shared_by(threads):
            assert decodings(group, hostile, flags) == decoded
            assert reductions(group, [hostile, hostile]) == reduced


def test_what_is_not_finite_spoils_its_segment_wherever_it_is() -> None:
    group = Group(segments.MINMAX, [segment(segments.MINMAX, 3 * LEAST, 512) for _ in range(3)])
    values = group.rows[1].gradient
    expected = group.encode(NATIVE)
    size = len(expected.payload) // 3
    for place in (0, LEAST + 1, 3 * LEAST - 1):
        kept, values[place] = values[place], np.inf
        with shared_by(3):
            result = group.encode(NATIVE)
        values[place] = kept
        assert result.flags == [0, 1, 0]
        start = int(group.table["payload"][1])
        wire = int(segments.wire_bytes_table(group.codec, group.table)[1])
        assert not any(result.payload[start : start + wire])
        assert result.payload[:size] == expected.payload[:size]
        assert result.payload[start + wire :] == expected.payload[start + wire :]


def test_callers_at_the_same_time_each_get_their_own_results() -> None:
    groups = [mixed(segments.MINMAX), mixed(segments.CODEBOOK_L2), mixed(segments.NVFP4)]
    expected = [encodings(group) for group in groups]
    found: list[list[Any]] = [[] for _ in groups]

    def call(i: int) -> None:
        for _ in range(10):
            found[i].append(encodings(groups[i]))

    with shared_by(3):
        callers = [threading.Thread(target=call, args=(i,)) for i in range(len(groups))]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
    assert found == [[each] * 10 for each in expected]


def test_arguments_are_checked_before_the_work_is_shared() -> None:
    group = mixed(segments.MINMAX)
    group.table["payload"][1] += 1 << 40
    try:
        with shared_by(3), pytest.raises(ValueError, match="segment 1: the segment does not lie inside"):
            group.encode(NATIVE)
    finally:
        group.table["payload"][1] -= 1 << 40


@pytest.mark.parametrize("number", [0, -1])
def test_no_threads_are_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"threads must be positive, got {number}"):
        dispatch.set_threads(number)


# ---- A process of its own, in which nobody has started a thread before

PROGRAM = """
import json, os, resource, signal, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import numpy as np
from gradcomp.kernels import dispatch, segments

length = 1 << 19
gradient = np.random.default_rng(0).standard_normal(length, np.float32)
payload = np.zeros(segments.wire_bytes(segments.MINMAX, length, 4, 512), np.uint8)
table = np.zeros(1, segments.SEGMENT)
table["gradient"], table["length"], table["level"], table["bucket_size"] = gradient.ctypes.data, length, 4, 512


def encode(threads):
    payload[:] = 0
    dispatch.set_threads(threads)
    native = dispatch.named("native")
    native.encode(segments.MINMAX, table, payload, np.zeros(1, np.uint8), draw=None, scale=1.0, decay=1.0)
    return payload.tobytes()


def number():
    return len(os.listdir("/proc/self/task"))


def print_facts(**facts):
    print(json.dumps(facts))
"""


def facts_of(program: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")


@linux
def test_threads_start_when_a_call_needs_them_and_stay() -> None:
    facts = facts_of("""
counts = [number()]
for threads in (1, 3, 3, 2, 5):
    encode(threads)
    counts.append(number() - counts[0])
print_facts(more=counts[1:])
""")
    assert facts == {"more": [0, 2, 2, 2, 4]}


@linux
def test_a_forked_child_has_threads_of_its_own() -> None:
    facts = facts_of("""
expected = encode(1)
encode(3)
child = os.fork()
if child == 0:
    signal.alarm(60)  # a child that waits for its parent's threads would wait for ever
    before = number()
    os._exit(number() - before if encode(3) == expected else 99)
_, status = os.waitpid(child, 0)
print_facts(ended=os.WIFEXITED(status), more=os.WEXITSTATUS(status), parent=encode(3) == expected)
""")
    assert facts == {"ended": True, "more": 2, "parent": True}


@linux
def test_a_system_that_starts_no_thread_is_an_error() -> None:
    if "libasan" in Path("/proc/self/maps").read_text():
        pytest.skip("the sanitizer needs address space of its own")
    facts = facts_of("""
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), -1))  # less than a thread's stack
try:
    encode(3)
    error = ""
except RuntimeError as refused:
    error = str(refused)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
print_facts(error=error, later=encode(3) == encode(1))
""")
    assert facts["error"].startswith("cannot start a thread for the kernels: ")
    assert facts["error"].endswith("; GRADCOMP_THREADS=1 needs none")
    assert facts["later"]
