"""``HorovodDriver``: what a process of an elastic job tells horovodrun, which starts processes, and hears of it.

horovodrun's driver starts processes on the hosts that its discovery script names. It looks for more of them once every
process that it knows has asked for its place, as Horovod's do after a failure. gradcomp's ranks have their places from
the job's store, and ask only for that: on a thread, since the answer comes when the last one has asked.
"""

from __future__ import annotations

import http.client
import logging
import os
import threading
from collections.abc import Mapping

from gradcomp.core.errors import ConfigError

logger = logging.getLogger("gradcomp")

_NEEDED = (
    "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_HOSTNAME", "HOROVOD_LOCAL_RANK",
)  # fmt: skip


def is_elastic(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether ``horovodrun --min-np`` started this process."""
    return environ.get("HOROVOD_ELASTIC") == "1" and _NEEDED[0] in environ


class HorovodDriver:
    """This process's connection to the driver. ConfigError if a variable is missing that horovodrun sets."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        if missing := [name for name in _NEEDED if not environ.get(name)]:
            raise ConfigError(f"HOROVOD_ELASTIC=1, but horovodrun has not set {', '.join(missing)}")
        address, port, host, slot = (environ[name] for name in _NEEDED)
        self._server = address, int(port)
        self._path = f"/rank_and_size/{host}:{slot}"
        self._asking: threading.Thread | None = None
        self._changed = False
        #: Whether the driver has no place for this process any more.
        self.removed = False
        try:
            from horovod.runner.elastic.worker import WorkerNotificationManager
        except ImportError:
            logger.warning(
                "Horovod cannot be imported, so horovodrun cannot tell this process of hosts that come: its script's "
                "new hosts are used after the next failure"
            )
            return
        self._manager = WorkerNotificationManager()
        self._manager.register_listener(self)
        self._manager.init()

    def on_hosts_updated(self, _timestamp: int, _update: int) -> None:
        """Hear that hosts have come or gone (on Horovod's thread)."""
        self._changed = True

    @property
    def hosts_changed(self) -> bool:
        """Return whether all ranks are to ask, since hosts have changed. The driver tells rank 0 alone."""
        return self._changed and not self._awaits_answer

    @property
    def _awaits_answer(self) -> bool:
        return self._asking is not None and self._asking.is_alive()

    def ask(self) -> None:
        """Ask for this process's place, unless an answer is due: the driver then starts what is missing."""
        if self._awaits_answer:
            return
        self._changed = False
        self._asking = threading.Thread(target=self._ask, name="gradcomp-horovodrun", daemon=True)
        self._asking.start()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(*self._server)
        try:
            connection.request("GET", self._path)
            answer = (
                connection.getresponse().read().decode()
            )  # rank,size,...; ranks of -1 for a place that is gone
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
            logger.warning("horovodrun's driver does not answer: %s", error)
            return
        finally:
            connection.close()
        self.removed = answer.startswith("-1")
