"""Counters and traces."""

from __future__ import annotations

import json
import sys
import threading

import numpy as np
import pytest

from gradcomp.core.statistics import Statistics, Trace


def written(trace: Trace, path) -> list[dict]:
    trace.write(path)
    return json.loads(path.read_text())["traceEvents"]


def test_a_trace_is_complete_events_in_microseconds(tmp_path):
    trace = Trace(10, rank=3)
    begin = trace._epoch + 1.0
    trace.add("wire", step=7, bucket=2, begin=begin, end=begin + 0.5)
    trace.add("encode", step=7, bucket=2, begin=begin, end=begin)
    events = written(trace, tmp_path / "t.json")
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in events} == {3}
    assert [names[e["tid"]] for e in spans] == ["wire", "encode"]
    assert spans[0]["ts"] == pytest.approx(1e6)
    assert spans[0]["dur"] == pytest.approx(5e5)
    assert spans[0]["args"] == {"step": 7, "bucket": 2}


def test_an_empty_trace_is_valid(tmp_path):
    assert written(Trace(0), tmp_path / "t.json") == []


def test_only_the_last_spans_are_kept(tmp_path):
    trace = Trace(3)
    for step in range(9):
        with trace.span("encode", step, 0):
            pass
    assert [span.step for span in trace.spans()] == [6, 7, 8]
    assert len(written(trace, tmp_path / "t.json")) == 4


def test_no_span_is_kept_without_capacity():
    trace = Trace(0)
    trace.add("encode", 0, 0, 0.0, 1.0)
    assert trace.spans() == ()


def test_a_span_is_recorded_even_if_its_block_raises():
    trace = Trace(3)
    with pytest.raises(KeyError), trace.span("encode", 0, 0):
        raise KeyError
    assert len(trace.spans()) == 1


def test_nothing_is_left_beside_the_file(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("old")
    written(Trace(1), path)
    assert list(tmp_path.iterdir()) == [path]


def test_writing_while_another_thread_records(tmp_path):
    trace = Trace(2000)
    stop = threading.Event()

    def record() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            trace.add(f"span {count}", 0, 0, 0.0, 1.0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=record)
    thread.start()
    try:
        for _ in range(10):
            events = written(trace, tmp_path / "t.json")
            assert {e["tid"] for e in events if e["ph"] == "X"} == {
                e["tid"] for e in events if e["ph"] == "M"
            }
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_the_mean_over_ranks_reads_back():
    ranks = [
        Statistics(10, 1, 1000, 8000, 0.5, 1.5, 0.25),
        Statistics(10, 1, 1001, 8000, 1.5, 2.5, 0.75),
    ]
    mean = Statistics.mean(np.sum([rank.vector() for rank in ranks], axis=0), 2)
    assert mean == Statistics(10, 1, 1000, 8000, 1.0, 2.0, 0.5)


def test_every_field_is_reduced():
    assert len(Statistics().vector()) == len(Statistics.FIELDS) == len(vars(Statistics()))


def test_ratio_is_dense_over_sent():
    assert Statistics(wire_bytes=100, dense_bytes=760).ratio == 7.6
    assert Statistics().ratio == 1.0
