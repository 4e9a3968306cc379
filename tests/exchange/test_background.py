"""Work beside the training: threads are used again, and nothing of the work stays."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from gradcomp.exchange.thread import finish_background, in_background


def test_one_thread_does_what_comes_after_each_other():
    threads = {in_background(threading.get_ident).result(10) for _ in range(50)}
    assert len(threads) == 1


def test_work_at_the_same_time_has_threads_of_its_own():
    meeting = threading.Barrier(3)
    works = [in_background(lambda: meeting.wait(10)) for _ in range(3)]
    assert {work.result(10) for work in works} == {0, 1, 2}


def test_nothing_of_the_work_stays():
    class Large:
        """What a closure holds."""

    large = Large()
    gone = weakref.ref(large)
    in_background(lambda held=large: None).result(10)
    in_background(lambda: None).result(10)  # by the same thread, which is done with the first
    del large
    gc.collect()
    assert gone() is None


def test_the_end_waits_for_what_is_under_way_and_work_may_begin_again():
    released, done = threading.Event(), []
    in_background(lambda: done.append(released.wait(10)))
    threading.Timer(0.1, released.set).start()
    finish_background()
    assert done == [True]
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0).result(10)
    assert in_background(lambda: 7).result(10) == 7
