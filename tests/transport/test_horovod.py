"""What only the Horovod transport does. The contract that it shares: test_contract.py."""

from __future__ import annotations

import inspect
import sys
import textwrap

import pytest
from transport_engines import no_horovod, under_horovodrun

from gradcomp import ConfigError


def test_a_missing_horovod_is_named(monkeypatch):
    from gradcomp.transport import horovod

    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    monkeypatch.setattr(horovod, "_horovod", horovod._horovod.__wrapped__)
    with pytest.raises(ConfigError, match=r"scripts/install_horovod\.sh \(\w+Error: "):
        horovod.HorovodTransport()


def test_what_horovod_cannot_do_is_said():
    if missing := no_horovod():
        pytest.skip(missing)

    def body():
        import horovod.torch as hvd
        import numpy as np
        import pytest

        from gradcomp import ConfigError, TransportError
        from gradcomp.transport.horovod import HorovodTransport, process_set

        hvd.init()  # by the program: without dynamic process sets
        ours = HorovodTransport()
        with pytest.raises(ConfigError, match=r"call process_set\(\[\d\]\) on all ranks"):
            HorovodTransport([hvd.rank()])
        with pytest.raises(ConfigError, match="HOROVOD_DYNAMIC_PROCESS_SETS"):
            process_set([0])
        with pytest.raises(ConfigError, match="not one of"):
            HorovodTransport([1 - hvd.rank()])
        with pytest.raises(ConfigError, match="ascending"):
            process_set([1, 0])
        with pytest.raises(TransportError, match=r"2147483648 bytes: Horovod takes up to 2\^31 - 1"):
            ours.alltoallv(np.zeros(0, np.uint8), [2**31, 0], np.zeros(0, np.uint8), [0, 0])
        assert ours.allgather_bytes(b"%d" % ours.rank) == [b"0", b"1"]

    source = textwrap.dedent(inspect.getsource(body)) + "\nbody()\n"
    (done,) = under_horovodrun(source, 2)
    assert done.returncode == 0, done.stdout + done.stderr
