"""Traces, and the file that grows with them."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import pytest

from gradcomp.core.errors import ConfigError
from gradcomp.core.trace import WHOLE_STEP, Timeline, Trace


def written(trace: Trace, path) -> list[dict]:
    trace.write(path)
    return json.loads(path.read_text())["traceEvents"]


def test_a_trace_is_complete_events_in_microseconds(tmp_path):
    trace = Trace(10, rank=3)
    begin = trace._epoch + 1.0
    trace.add(("send", 7, 2, begin, begin + 0.5))
    trace.add(("compress", 7, 2, begin, begin))
    events = written(trace, tmp_path / "t.json")
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in events} == {3}
    assert [names[e["tid"]] for e in spans] == ["bucket 2", "bucket 2"]
    assert [e["name"] for e in spans] == ["send", "compress"]
    assert spans[0]["ts"] == pytest.approx(1e6)
    assert spans[0]["dur"] == pytest.approx(5e5)
    assert spans[0]["args"] == {"step": 7}


def test_only_the_last_spans_are_kept(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("old")
    for capacity, kept in ((3, [6, 7, 8]), (0, [])):
        trace = Trace(capacity)
        for step in range(9):
            trace.add(("compress", step, 0, 0.0, 1.0))
        assert [span.step for span in trace.spans()] == kept
        assert len(written(trace, path)) == len(kept) + bool(kept)
        assert list(tmp_path.iterdir()) == [path]  # nothing is left beside the file


def test_writing_while_another_thread_records(tmp_path):
    trace = Trace(2000)
    stop = threading.Event()

    def record() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            trace.add(("send", 0, count % 97, 0.0, 1.0))

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


def events_of(path) -> list[dict]:
    try:
        return json.loads(path.read_text())["traceEvents"]
    except json.JSONDecodeError:  # read while it was being written, which takes microseconds
        time.sleep(0.05)
        return json.loads(path.read_text())["traceEvents"]


def test_a_timeline_is_valid_after_every_write_and_holds_all(tmp_path):
    path = tmp_path / "timeline.json"
    timeline = Timeline(path, rank=1)
    assert [e["name"] for e in events_of(path)] == ["process_name"]
    trace = Trace(2)
    timeline.listen(trace)
    counted = 0
    end = time.monotonic() + 1.3
    while time.monotonic() < end:
        for _ in range(50):
            trace.add(("send", counted, counted % 5, 0.0, 1.0))
            counted += 1
        events_of(path)
    timeline.close()
    spans = [e for e in events_of(path) if e["ph"] == "X"]
    assert [e["args"]["step"] for e in spans] == list(range(counted))
    trace.add(("send", 0, 0, 0.0, 1.0))  # nobody listens any more
    assert len(events_of(path)) == 1 + 5 + counted


def test_rows_are_buckets_of_an_exchanger(tmp_path):
    path = tmp_path / "timeline.json"
    timeline = Timeline(path, rank=0)
    traces = [Trace(9), Trace(9)]
    for trace in traces:
        timeline.listen(trace)
    for trace in traces:
        for bucket in (0, WHOLE_STEP):
            trace.add(("feedback", 3, bucket, 0.0, 1.0))
    timeline.close()
    names = {e["tid"]: e["args"]["name"] for e in events_of(path) if e["name"] == "thread_name"}
    rows = [names[e["tid"]] for e in events_of(path) if e["ph"] == "X"]
    assert rows == ["bucket 0", "step", "bucket 0, exchange 1", "step, exchange 1"]


def test_each_step_is_marked_once(tmp_path):
    path = tmp_path / "timeline.json"
    timeline, trace = Timeline(path, rank=0, mark_steps=True), Trace(0)
    timeline.listen(trace)
    for step in (0, 1):
        for bucket in (0, 1):
            trace.add(("ready", step, bucket, 0.0, 1.0))
    timeline.close()
    timeline.close()
    assert [e["name"] for e in events_of(path) if e["ph"] == "i"] == ["step 0", "step 1"]


def test_a_full_disk_ends_the_timeline_and_leaves_it_valid(tmp_path, monkeypatch, caplog):
    path = tmp_path / "timeline.json"
    timeline, trace = Timeline(path, rank=0), Trace(0)
    timeline.listen(trace)
    trace.add(("send", 0, 0, 0.0, 1.0))
    whole = os.pwrite

    def half(file: int, text: bytes, at: int) -> int:
        return whole(file, text[: len(text) // 2] if len(text) > 20 else text, at)

    monkeypatch.setattr(os, "pwrite", half)
    timeline.close()
    assert len(events_of(path)) == 1
    assert "the disk is full" in caplog.text


@pytest.mark.parametrize("path", ["missing/timeline.json", "", "nul\0"])
def test_a_file_that_cannot_be_made(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="cannot write the timeline"):
        Timeline(path, rank=0)
