"""Errors under Horovod's names."""

from __future__ import annotations

from gradcomp.core.errors import GradcompError

#: What ``except hvd.HorovodInternalError`` catches: every error that gradcomp raises on purpose.
HorovodInternalError = GradcompError


class HostsUpdatedInterrupt(GradcompError):  # noqa: N818
    """Never raised, for a job's hosts do not change; scripts may still catch it."""
