"""Arguments that no caller should give: every kernel of every backend refuses them before it touches any memory.

Each kernel has a well-formed call of two rows; a test spoils an argument, mostly in the second row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from kernels.backends import ALL, HOST, each_of
from kernels.calls import (
    ANY_LENGTH,
    CODEC,
    LENGTH,
    LISTS,
    MEMORY,
    OF_FACTORS,
    OF_RESIDUALS,
    SELECTING,
    TABLES,
    UNALIGNED,
    WRITTEN,
    arrays_of,
    call,
    names_for,
    well_formed,
)
from kernels.groups import magnitudes_of
from kernels.standin import is_gpu

from gradcomp.kernels import dispatch, segments


def refused(
    backend: Any, kernel: str, given: dict[str, Any], error: type[Exception], words: str = ""
) -> None:
    """Such a call raises the error, with such words, and writes nothing."""
    arrays = {name: each for name, each in given.items() if isinstance(each, np.ndarray)} | {"memory": MEMORY}
    before = {name: np.array(each) for name, each in arrays.items()}
    raised: Exception | None = None
    try:
        call(backend, kernel, given)
    except error as caught:
        raised = caught
    assert raised is not None, f"{kernel} takes {given}"
    assert re.search(words, str(raised)), f"{kernel}: {raised}"
    for name, each in arrays.items():
        assert before[name].tobytes() == np.array(each).tobytes(), f"{kernel} wrote {name}"


def unaligned(array: Any) -> Any:
    found = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    found[...] = 1  # other contents than those of a call that CUDA has prepared
    return found


CASES = [(name, kernel) for kernel in WRITTEN for name in names_for(kernel)]
KERNEL = pytest.mark.parametrize(("backend", "kernel"), CASES, indirect=["backend"])


@KERNEL
def test_well_formed_calls_are_taken(backend: Any, kernel: str) -> None:
    given = well_formed(kernel)
    for name in {name for name, _ in arrays_of(kernel)} - {*WRITTEN[kernel], "table"}:
        given[name].flags.writeable = False  # what is only read may lie where nobody can write
    call(backend, kernel, given)
    MEMORY[:] = 1


@KERNEL
def test_arrays_of_another_kind_are_refused(backend: Any, kernel: str) -> None:
    for name, right in arrays_of(kernel):
        if name == "table" and is_gpu(backend):
            continue  # a copy goes to the GPU
        wrong = [right[..., None], right.repeat(2, axis=-1)[..., ::2], right.tolist(), None]
        if name != "table":
            wrong += [right.astype(np.int16), right.astype(np.float64 if right.dtype != np.float64 else "f4")]
        if kernel in UNALIGNED and right.itemsize > 1 and name not in ("table", "chosen"):
            wrong.append(unaligned(right))
        for each in wrong:
            refused(backend, kernel, well_formed(kernel) | {name: each}, TypeError)


@pytest.mark.parametrize(
    ("backend", "kernel"), [(name, kernel) for name, kernel in CASES if WRITTEN[kernel]], indirect=["backend"]
)
def test_targets_that_are_read_only_are_refused(backend: Any, kernel: str) -> None:
    for name in WRITTEN[kernel]:
        given = well_formed(kernel)
        given[name].flags.writeable = False
        refused(backend, kernel, given, TypeError)


@KERNEL
def test_another_number_of_rows_is_refused(backend: Any, kernel: str) -> None:
    for name, right in arrays_of(kernel):
        if name != "table" and name not in ANY_LENGTH and not (name == "out" and kernel == "reduce"):
            for wrong in (right[..., :1].copy(), np.concatenate((right, right), axis=-1)):
                refused(backend, kernel, well_formed(kernel) | {name: wrong}, ValueError, "items for|offsets")


SPOILED: dict[str, tuple[Iterable[str], str, list[int], str]] = {
    "length negative": (TABLES, "length", [-1], ""),
    "length huge": (TABLES, "length", [2**62], ""),
    "length beyond an index": ((*OF_RESIDUALS, "squares"), "length", [1 << 32], "elements"),
    "length of another matrix": (OF_FACTORS, "length", [20], "segment 1"),
    "start": (TABLES, "start", [-1, segments.MAX_ELEMENTS], ""),
    "dtype": (TABLES, "dtype", [-1, 4], "dtype|1"),
    "float64": (
        (*CODEC, "contribute", "select_top", "select_adacomp", "scatter_mean", *OF_FACTORS),
        "dtype", [segments.FLOAT64], "float64|float32",
    ),
    "half precision": (("decode_add",), "dtype", [segments.FLOAT16], "float32"),
    "no next residual": ((*OF_RESIDUALS, "project", "back_project", "subtract"), "next_residual", [0], "next residual"),
    "payload": (CODEC, "payload", [-1, 20, 2**63 - 1], "lie inside"),
    "bucket size": (CODEC, "bucket_size", [0, -1], "bucket_size"),
    "bits": (CODEC, "level", [0, 9, -(2**31)], "bits"),
    "rows": ((*OF_FACTORS, "orthogonalise"), "rows", [-1, 2**62, 2**63 - 1], "segment 1"),
    "rows of another matrix": (OF_FACTORS, "rows", [4, 0], "segment 1"),
    "columns": (OF_FACTORS, "columns", [-7, 6, 2**62], "segment 1"),
    "ranks": ((*OF_FACTORS, "orthogonalise"), "ranks", [-1, 3, 2**62, 2**63 - 1], "segment 1"),
    "place of P": ((*OF_FACTORS, "orthogonalise"), "p_at", [-1, 7, 2**62, -(2**63)], "segment 1"),
    "place of Q": (OF_FACTORS, "q_at", [-1, 15, 2**62, -(2**63)], "segment 1"),
    "offset": ((*SELECTING, *LISTS, "draw_indices"), "offsets", [-1, 3, 2**63 - 1], "lie inside"),
    "count": ((*SELECTING, *LISTS, "draw_indices"), "counts", [-1, 3, 2**63 - 1], ""),
    "count of a sample": (("sample_thresholds",), "counts", [-1, 22, 2**63 - 1], "count"),
    "limit": (("select_above", "select_adacomp"), "limits", [-1, 3], "lie inside"),
    "index of a selection": (("take", "put"), "indices", [LENGTH, 2**32 - 1], "row's length"),
    "coding": (LISTS, "codings", [4, -(2**31)], "row 1: unknown coding"),
    "coding of all elements": (LISTS, "codings", [3], "row 1: coding ALL"),
    "length of a list": (LISTS, "lengths", [-1, 2**32 + 1], "row 1: length"),
    "length of a row": (("draw_indices",), "lengths", [-1, 2**32], "row 1: length"),
    "count above the length": ((*LISTS, "draw_indices"), "lengths", [1], "row 1: count"),
    "place": (LISTS, "places", [-1, 9, 2**63 - 2], "row 1: the row"),
}  # fmt: skip
"""Kernels, an argument or a column of the table, items of its second row that cannot be, and words of the error."""


OF_BACKENDS = [
    (name, case)
    for case, (of, *_) in SPOILED.items()
    for name in ALL
    if any(name in names_for(kernel) for kernel in of)
]


@pytest.mark.parametrize(("backend", "case"), OF_BACKENDS, indirect=["backend"])
def test_numbers_that_cannot_be_are_refused(backend: Any, case: str, request: pytest.FixtureRequest) -> None:
    of, name, items, words = SPOILED[case]
    ran = 0
    for kernel in sorted(of):
        if request.node.callspec.params["backend"] not in names_for(kernel):
            continue
        for item in items:
            given = well_formed(kernel)
            if name in given and name != "payload":
                given[name][-1] = item
            elif name in segments.SEGMENT.names:
                given["table"][name][-1] = item
            else:
                continue
            refused(backend, kernel, given, ValueError, words)
            ran += 1
    assert ran or not any(request.node.callspec.params["backend"] in names_for(kernel) for kernel in of)


@each_of(ALL)
@pytest.mark.parametrize(
    ("kernel", "changes", "words"),
    [
        ("sample_thresholds", {"stride": 0}, "stride"),
        ("sample_thresholds", {"stride": -1}, "stride"),
        ("sample_thresholds", {"phase": -1}, "phase"),
        ("select_adacomp", {"bin_size": 0}, "bin_size"),
        ("select_adacomp", {"bin_size": -5}, "bin_size"),
        *(("scatter_mean", {"divisor": each}, "divisor") for each in (0.0, 1e-50, -1.0, np.nan)),
        *(("scatter_mean", {"scale": each}, "divisor") for each in (-1.0, -0.0, np.inf, 1e39, np.nan)),
        *(("scatter_mean", {"indices": np.array(each, np.uint32)}, "row 1: ") for each in
          ([1, 2, 5, 21], [1, 2, 5, 2**32 - 1], [1, 2, 5, 5], [1, 2, 5, 4], [1, 2, 5])),
        ("scatter_mean", {"values": np.ones(3, np.float32)}, "row 1: "),
        *(("scatter_mean", {"counts": np.array([[1, 1], [0, each]])}, "row 1: ") for each in (-1, 3, 2**63 - 1)),
        *(("scatter_mean", {"offsets": np.array([[0, 1], [2, each]])}, "row 1: ") for each in (-1, 3, 2**63 - 2)),
        *(("scatter_mean", {name: np.zeros(shape, np.int64)}, "offsets")
          for name in ("offsets", "counts") for shape in ((1, 2), (2, 1), (2, 3))),
    ],
)  # fmt: skip
def test_other_arguments_that_cannot_be_are_refused(
    backend: Any, kernel: str, changes: dict[str, Any], words: str
) -> None:
    refused(backend, kernel, well_formed(kernel) | changes, ValueError, words)


@each_of(ALL)
@pytest.mark.parametrize("kernel", LISTS)
def test_indices_inside_the_payload(backend: Any, kernel: str) -> None:
    memory = np.array([1, 2, 5, 20, 0, 0, 0, 0], np.uint32)
    given = well_formed(kernel) | {"indices": memory[:4], "payload": memory.view(np.uint8)[15:31]}
    refused(backend, kernel, given, ValueError, "overlap")


# --- codecs -------------------------------------------------------------------------------------------------

OF_CODECS = {
    "payload too short by a scale": (segments.L2, {"bucket_size": 1}),
    "bits 9 of a shift": (segments.MINMAX_SHIFT, {"level": 9}),
    "bits 0 of a sign": (segments.SIGN, {"level": 0}),
    "bits 2 of a sign": (segments.VOTE, {"level": 2}),
    "bits 1 of a codebook": (segments.CODEBOOK_L2, {"level": 1}),
    "bits 9 of a codebook": (segments.CODEBOOK_LINF, {"level": 9}),
    "bits 8 between extremes": (segments.CODEBOOK_MINMAX, {"level": 8}),
    "payload too short for two means": (segments.ONEBIT, {"level": 1, "length": 512, "bucket_size": 64}),
    "bucket negative": (segments.FP16, {"bucket_size": -1, "length": 1}),
    "length huge": (segments.FP64, {"length": 2**62, "dtype": segments.FLOAT64}),
    "dtype negative": (segments.FP32, {"dtype": -1, "length": 1}),
    "float64 with a float32 codec": (segments.FP32, {"dtype": segments.FLOAT64, "length": 1}),
    "float32 with FP64": (segments.FP64, {"length": 1}),
    "codec unknown": (99, {}),
    "codec negative": (-1, {}),
}


@each_of(HOST)
@pytest.mark.parametrize(("codec", "columns"), OF_CODECS.values(), ids=OF_CODECS)
def test_malformed_rows_of_codecs(backend: Any, codec: int, columns: dict[str, int]) -> None:
    for kernel in CODEC:
        given = well_formed(kernel, codec)
        for name, value in columns.items():
            given["table"][name] = value
        words = r"segment|codec|bits|bucket_size|dtype|elements|payload|float32"
        refused(backend, kernel, given, ValueError, words)


def bad_magnitudes(*row: float) -> Any:
    magnitudes = magnitudes_of(segments.CODEBOOK_L2)
    magnitudes[3, :4] = row
    return magnitudes


BAD_MAGNITUDES = {
    "missing": (None, ValueError),
    "not from 0": (bad_magnitudes(0.1, 0.2, 0.5, 1), ValueError),
    "not to 1": (bad_magnitudes(0, 0.2, 0.5, 0.9), ValueError),
    "beyond 1": (bad_magnitudes(0, 0.2, 0.5, 1.5), ValueError),
    "not ascending": (bad_magnitudes(0, 0.5, 0.2, 1), ValueError),
    "not a number": (bad_magnitudes(0, 0.5, np.nan, 1), ValueError),
    "another shape": (np.zeros((8, 128), np.float32), ValueError),
    "float64": (magnitudes_of(segments.CODEBOOK_L2).astype(np.float64), TypeError),
    "one dimension": (magnitudes_of(segments.CODEBOOK_L2).reshape(-1), TypeError),
    "strided": (np.asfortranarray(magnitudes_of(segments.CODEBOOK_L2)), TypeError),
    "a list": ([0.0, 1.0], TypeError),
}


@each_of(HOST)
@pytest.mark.parametrize(("wrong", "error"), BAD_MAGNITUDES.values(), ids=BAD_MAGNITUDES)
def test_wrong_magnitudes(backend: Any, wrong: Any, error: type[Exception]) -> None:
    for kernel in CODEC:
        given = well_formed(kernel, segments.CODEBOOK_L2) | {"magnitudes": wrong}
        given["table"]["level"] = 3
        refused(backend, kernel, given, error)


@each_of(HOST)
@pytest.mark.parametrize(
    "row", [(-0.1, 0.5, 0.7, 1), (0, 0.5, 0.4, 1), (0, 0.5, 0.7, 1.1), (0, np.nan, 0.7, 1)]
)
def test_levels_ascend_within_0_and_1(backend: Any, row: tuple[float, ...]) -> None:
    magnitudes = magnitudes_of(segments.CODEBOOK_MINMAX)
    magnitudes[2, :4] = row
    for kernel in CODEC:
        given = well_formed(kernel, segments.CODEBOOK_MINMAX) | {"magnitudes": magnitudes}
        given["table"]["level"] = 2
        refused(backend, kernel, given, ValueError, "ascend within 0..1")


@each_of(HOST)
def test_only_the_magnitudes_in_use_matter(backend: Any) -> None:
    wrong_for_three = {"magnitudes": bad_magnitudes(0, 0.5, 0.2, 1)}
    call(backend, "decode", well_formed("decode", segments.CODEBOOK_L2) | wrong_for_three)
    MEMORY[:] = 1
    refused(
        backend, "decode", well_formed("decode", segments.L2) | wrong_for_three, ValueError, "nothing else"
    )


@each_of(HOST)
@pytest.mark.parametrize("kernel", ["decode", "decode_add"])
def test_rows_without_output_are_not_checked(backend: Any, kernel: str) -> None:
    given = well_formed(kernel)
    given["table"]["output"], given["table"]["payload"] = 0, 10**6
    call(backend, kernel, given)


@each_of(HOST)
def test_reduce_of_nothing_onto_itself_or_from_what_is_no_payload(backend: Any) -> None:
    given = well_formed("reduce")
    short, wrong = given["payloads"][0][:-1], given["payloads"][0].astype(np.int8)
    refused(backend, "reduce", given | {"payloads": []}, ValueError, "at least one")
    refused(backend, "reduce", given | {"payloads": [given["out"]]}, ValueError, "overlaps")
    refused(backend, "reduce", given | {"payloads": [given["payloads"][0], short]}, ValueError, "lie inside")
    refused(backend, "reduce", given | {"payloads": [given["payloads"][0], wrong]}, TypeError)


@pytest.mark.parametrize(
    "arguments",
    [(99, 1, 1, 1), (0, -1, 1, 1), (0, 1, 0, 1), (0, 1, 9, 1), (7, 1, 2, 1), (10, 1, 1, 1), (0, 1, 1, 0)],
)
def test_wire_bytes_of_nonsense(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"codec|length|bits|bucket_size"):
        segments.wire_bytes(*arguments)


# --- the dynamic program ------------------------------------------------------------------------------------


@each_of(HOST)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": np.ones((1, 3), np.int32)}, "do not have the same shape"),
        ({"costs": np.ones((2, 2))}, "do not have the same shape"),
        ({"steps": np.array([[1, 1, 1], [1, 1, -1]], np.int32)}, "layer 1: steps are negative"),
        ({"costs": np.array([[1, 1, 1], [1, 1, -1.0]])}, "layer 1: a cost is negative or not a number"),
        ({"costs": np.array([[1, 1, 1], [1, 1, np.nan]])}, "layer 1: a cost is negative or not a number"),
        ({"budget": -1}, "budget -1 is negative"),
        ({"costs": np.full((2, 3), 1e308)}, "the costs add up to more than a float64 holds"),
        ({"steps": np.array([[0, 1 << 25]] * 2, np.int32), "costs": np.array([[2.0, 1]] * 2), "budget": 1 << 25},
         "more than 16777216 steps"),
        ({"steps": np.zeros((2, 65537), np.int32), "costs": np.zeros((2, 65537))}, "more than 65536 choices"),
    ],
)  # fmt: skip
def test_programs_that_cannot_be(backend: Any, changes: dict[str, Any], words: str) -> None:
    refused(backend, "cheapest", well_formed("cheapest") | changes, ValueError, words)


@each_of(HOST)
def test_the_choice_is_untouched_unless_one_is_found(backend: Any) -> None:
    given = well_formed("cheapest") | {"budget": 1}
    assert not backend.cheapest(given["steps"], given["costs"], given["chosen"], budget=1)
    assert given["chosen"].tolist() == [7, 7]


# --- backends -----------------------------------------------------------------------------------------------


def test_selecting_a_backend() -> None:
    before = dispatch.backend()
    with dispatch.use("reference"):
        assert dispatch.backend() == "reference"
    assert dispatch.backend() == before
    with pytest.raises(ValueError, match="not installed"):
        dispatch.use("abacus")  # type: ignore[arg-type]


def test_selecting_an_instruction_set() -> None:
    extension = pytest.importorskip("gradcomp._native")
    assert extension.isa() in extension.available_isas()
    with pytest.raises(ValueError, match="sse9"):
        extension.set_isa("sse9")
