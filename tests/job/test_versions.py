"""Ranks of different versions do not begin."""

from __future__ import annotations

import preloaded
import pytest
from launching import run_ranks

from gradcomp import ConfigError, WireFormatError
from gradcomp.job.membership import _introduction
from gradcomp.reduce.header import PROTOCOL


def test_ranks_with_another_protocol_are_refused_by_all():
    source = """
        import os
        import gradcomp.torch as gc
        from gradcomp.job import membership

        membership.PROTOCOL += int(os.environ["RANK"])
        try:
            gc.init(timeout_seconds=20)
        except gc.ConfigError as error:
            print(error)
    """
    for finished in run_ranks(source, 2, imported=preloaded.TORCH):
        assert finished.returncode == 0, finished.stderr
        assert "rank 0 runs gradcomp" in finished.stdout
        assert f"wire protocol {PROTOCOL}, rank 1 gradcomp" in finished.stdout


def test_an_introduction_of_an_earlier_version_is_named():
    with pytest.raises(ConfigError, match="another version of gradcomp"):
        _introduction(b'["host", "torch", "[]"]')
    with pytest.raises(WireFormatError):
        _introduction(b"\xff\x00")
