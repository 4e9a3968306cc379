"""What only the MPI transport does. The contract that it shares: test_contract.py."""

from __future__ import annotations

import inspect
import textwrap
import time
from collections.abc import Callable, Mapping

import pytest
from launching import Finished, run_ranks
from transport_engines import no_mpi, under_mpiexec

pytestmark = pytest.mark.skipif(bool(no_mpi()), reason=no_mpi())

WITHOUT_READING_OF_OTHERS_MEMORY = {"MPIR_CVAR_CH4_CMA_ENABLE": "0"}


def under_mpi(body: Callable[[], None], world: int, env: Mapping[str, str] | None = None) -> Finished:
    """Run a function's body as a program on ``world`` ranks."""
    source = textwrap.dedent(inspect.getsource(body)) + f"\n{body.__name__}()\n"
    return under_mpiexec(source, world, env)


def succeeds(done: Finished) -> None:
    assert done.returncode == 0, done.stdout + done.stderr


# ------------------------------------------------------------------------------------------ it cannot start


def test_what_is_missing_is_named():
    def body():
        import os
        import sys

        import pytest

        from gradcomp import ConfigError
        from gradcomp.transport.mpi import MpiTransport

        sys.modules["mpi4py"] = None
        with pytest.raises(ConfigError, match=r"pip install gradcomp\[mpi\]"):
            MpiTransport()
        del sys.modules["mpi4py"]
        os.environ["MPI4PY_LIBMPI"] = "/nowhere"
        with pytest.raises(ConfigError, match=r"pip install gradcomp\[mpi\] .*cannot load MPI library"):
            MpiTransport()
        del os.environ["MPI4PY_LIBMPI"]
        with pytest.raises(
            ConfigError, match="the job has 2 processes, MPI sees 1: start them by the mpiexec"
        ):
            MpiTransport(world=2)
        with pytest.raises(
            ConfigError, match=r"ranks \[0, 1\] are not some of the 1 .*start them by mpiexec"
        ):
            MpiTransport([0, 1])
        with pytest.raises(ConfigError, match=r"ranks \[0, 0\]"):
            MpiTransport([0, 0])
        with pytest.raises(ConfigError, match=r"rank 0 is not one of \[\]"):
            MpiTransport([])
        MpiTransport(world=1).close()
        sys.modules["mpi4py"].MPI.Finalize()
        with pytest.raises(ConfigError, match="finalised"):
            MpiTransport()

    (done,) = run_ranks(body, 1, env=lambda rank: {})
    succeeds(done)


def test_mpi_for_one_thread_is_refused():
    def body():
        import mpi4py
        import pytest

        from gradcomp import ConfigError
        from gradcomp.transport.mpi import MpiTransport

        mpi4py.rc.thread_level = "funneled"
        with pytest.raises(ConfigError, match="MPI_THREAD_FUNNELED"):
            MpiTransport()

    (done,) = run_ranks(body, 1, env=lambda rank: {})
    succeeds(done)


def test_ranks_that_do_not_meet_end_the_job():
    def body():
        import time

        from mpi4py import MPI

        from gradcomp import TransportError
        from gradcomp.transport.mpi import MpiTransport

        if MPI.COMM_WORLD.rank == 0:
            try:
                MpiTransport(timeout_seconds=0.5)
            except TransportError as error:
                print(error)
        else:
            time.sleep(100)

    done = under_mpi(body, 2)
    assert done.returncode not in (0, -15)
    assert "ranks [0, 1] did not all meet within 0.5 s" in done.stdout


# ------------------------------------------------------------------------------------------ it runs


def test_threads_share_an_mpi_that_is_for_one_at_a_time():
    def body():
        import threading

        import mpi4py
        import numpy as np

        mpi4py.rc.thread_level = "serialized"
        from mpi4py import MPI

        from gradcomp.transport.base import wait
        from gradcomp.transport.mpi import MpiTransport

        assert MPI.Query_thread() == MPI.THREAD_SERIALIZED
        ours = [MpiTransport() for _ in range(3)]
        sums = np.zeros(3)

        def work(number):
            for _ in range(200):
                array = np.full(1000, float(number))
                wait(ours[number].allreduce(array))
                sums[number] += array[-1]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sums.tolist() == [0, 400, 800], sums

    succeeds(under_mpi(body, 2))


def test_a_message_of_another_length_is_an_error_that_names_its_rank():
    def body():
        import re

        import numpy as np
        import pytest

        from gradcomp import TransportError
        from gradcomp.transport.base import wait
        from gradcomp.transport.mpi import MpiTransport

        ours = MpiTransport()
        other = 1 - ours.rank
        for length, text in (
            (3, f"rank {other} sent 3 bytes, 5 were expected"),
            (9, f"message from rank {other}"),
        ):
            sends = [(other, np.zeros(length, np.uint8))]
            with pytest.raises(TransportError, match=re.escape(text)):
                wait(ours.exchange(sends, [(other, np.zeros(5, np.uint8))]))

    succeeds(under_mpi(body, 2))


def test_counts_that_an_old_mpi_cannot_have_are_refused():
    def body():
        from types import SimpleNamespace

        import numpy as np
        import pytest

        from gradcomp import TransportError
        from gradcomp.transport.mpi import MpiTransport

        ours = MpiTransport()
        MPI = ours._process.MPI
        ours._process.MPI = SimpleNamespace(**{**vars(MPI), "VERSION": 3, "SUBVERSION": 1})
        too_many = np.broadcast_to(np.float32(0), 2**31)  # of no memory
        with pytest.raises(TransportError, match=r"2147483648 elements: MPI 3\.1 counts to"):
            ours.allreduce(too_many)
        ours._process.MPI = MPI

    (done,) = run_ranks(body, 1, env=lambda rank: {})
    succeeds(done)


@pytest.mark.alone
def test_polls_with_pauses_move_large_messages():
    """Where each test of a request moves 8 KB, one test per poll would take 2048 polls."""

    def body():
        import time

        import numpy as np

        from gradcomp.transport.mpi import MpiTransport

        ours = MpiTransport()
        part = 16 << 20
        send, recv = np.full(2 * part, 1 + ours.rank, np.uint8), np.zeros(2 * part, np.uint8)
        handle = ours.alltoallv(send, [part] * 2, recv, [part] * 2)
        polls = 0
        while not handle.poll():
            time.sleep(200e-6)
            polls += 1
        assert recv[:part].min() == recv[:part].max() == 1
        assert recv[part:].min() == recv[part:].max() == 2
        assert polls < 1000, polls

    succeeds(under_mpi(body, 2, WITHOUT_READING_OF_OTHERS_MEMORY))


# ------------------------------------------------------------------------------------------ control channel


def test_what_ranks_publish_all_look_up():
    def body():
        import time

        import numpy as np

        from gradcomp.transport.base import wait
        from gradcomp.transport.mpi import MpiTransport
        from gradcomp.transport.mpi_process import MpiControl

        def soon(key, value):
            deadline = time.monotonic() + 20
            while control.lookup(key) != value:
                assert time.monotonic() < deadline, (key, value, control.lookup(key))
                time.sleep(1e-3)

        def meet():
            wait(ours.allreduce(np.zeros(1)))

        ours, control, other = MpiTransport(), MpiControl(), MpiControl()
        assert control.lookup("nothing") is None
        for value in (b"first", b"", b"last"):
            if ours.rank == 1:
                control.publish("key", value)
                soon("key", value)
            meet()
        soon("key", b"last")
        assert other.lookup("key") is None
        # Everyone at once, over and over: in the end all hold the same.
        for number in range(50):
            control.publish("shared", b"%d of %d" % (number, ours.rank))
        control.publish(f"done/{ours.rank}", b"x")
        for rank in range(ours.size):
            soon(f"done/{rank}", b"x")
        assert len(set(ours.allgather_bytes(control.lookup("shared")))) == 1
        # Who has seen a value overwrites it, whatever the clocks of the others were.
        for writer in range(ours.size):
            if ours.rank == writer:
                control.publish("shared", b"by %d" % writer)
            soon("shared", b"by %d" % writer)
        meet()
        control.publish(f"large/{ours.rank}", b"z" * 300_000)
        for rank in range(ours.size):
            soon(f"large/{rank}", b"z" * 300_000)
        meet()

    succeeds(under_mpi(body, 3))


# ------------------------------------------------------------------------------------------ failure


def test_a_rank_that_stays_away_is_named_and_each_rank_ends_in_its_own_way():
    def body():
        import sys
        import time

        import numpy as np

        from gradcomp import Config, LayerSpec, Policy, Quantize, TransportError
        from gradcomp.exchange.arrivals import Submission
        from gradcomp.exchange.exchanger import Exchanger
        from gradcomp.exchange.thread import Engine
        from gradcomp.exchange.watchdog import Watchdog
        from gradcomp.transport.mpi import MpiTransport
        from gradcomp.transport.mpi_process import MpiControl

        def step():
            gradient = np.full(1600, ours.rank + 1.0, np.float32)
            exchanger.open()
            exchanger.pipeline.arrivals.submit(
                Submission(0, gradient.ctypes.data, gradient.ctypes.data, gradient)
            )
            exchanger.flush()
            exchanger.wait()
            exchanger.commit()
            return gradient

        ours = MpiTransport()
        layers = [LayerSpec("a", (40, 40), "float32")]
        plan = Policy(Quantize(4)).plan(layers)
        config = Config(timeout_seconds=1.0)
        engine, watchdog = Engine(), Watchdog(MpiControl(), ours.rank)
        exchanger = Exchanger(engine, layers, plan, ours, watchdog, config, lambda layer: 0)
        for _ in range(3):
            assert np.allclose(step(), 2.0, rtol=1e-5)
        try:
            if ours.rank == 2:
                time.sleep(3)
            step()
        except TransportError as error:
            print(f"rank {ours.rank}: {error}\n", end="")
        engine.stop()
        exchanger.close()
        watchdog.stop()
        sys.exit(7)

    done = under_mpi(body, 3)
    assert done.returncode == 7, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert {line[:6] for line in lines} == {"rank 0", "rank 1", "rank 2"}
    assert all("rank 2 has only reached step" in line for line in lines)


@pytest.mark.alone
def test_a_stopped_rank_does_not_keep_the_others_from_ending():
    def body():
        import os
        import signal
        import time

        import numpy as np

        from gradcomp.transport import mpi_process
        from gradcomp.transport.mpi import MpiTransport
        from gradcomp.transport.mpi_process import MpiControl

        mpi_process.FAREWELL_SECONDS = 1.0
        ours, control = MpiTransport(), MpiControl()
        if ours.rank == 1:
            control.publish("stopped", b"1")
            os.kill(os.getpid(), signal.SIGSTOP)
        while control.lookup("stopped") is None:
            time.sleep(1e-3)
        time.sleep(0.2)
        handle = ours.allreduce(np.zeros(3))
        for number in range(2000):  # nobody takes them
            control.publish(f"key {number}", b"x" * 1000)
        assert not handle.poll()
        ours.abandon()
        print("rank 0 ends")

    begin = time.monotonic()
    done = under_mpi(body, 2)
    assert time.monotonic() - begin < 40
    assert done.returncode not in (0, -15)
    assert "rank 0 ends" in done.stdout
