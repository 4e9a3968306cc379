"""Finds out why an address does not answer: nothing listens there, packets are dropped, or there is no such host."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

from gradcomp.job.launch import Address

_PAUSE_SECONDS = 0.2
_ATTEMPT_SECONDS = 3.0
#: Ports on which a host is asked whether it is there; a refusal is an answer too.
_KNOCKS = (22, 9, 1, 65534)
_KNOCK_SECONDS = 1.5


class Answer(Enum):
    """How an address answers a connection."""

    YES = "answers"
    REFUSED = "refuses connections: nothing listens there"
    SILENT = "does not answer: packets are dropped"
    NO_WAY = "cannot be reached: there is no route to it, or no such host"
    NO_NAME = "has no address: the name is not known"
    FORBIDDEN = "is forbidden by this host's own firewall"


def ask(address: Address, seconds: float = _ATTEMPT_SECONDS) -> Answer:
    """Connect once, and hang up."""
    try:
        socket.create_connection(address, timeout=seconds).close()
    except OSError as error:
        return classified(error)
    return Answer.YES


def classified(error: OSError) -> Answer:
    """Return what an error of a connection says about the address."""
    if isinstance(error, socket.gaierror):
        return Answer.NO_NAME
    if isinstance(error, ConnectionRefusedError):
        return Answer.REFUSED
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN):
        return Answer.NO_WAY
    return Answer.FORBIDDEN if error.errno in (errno.EACCES, errno.EPERM, errno.EINVAL) else Answer.SILENT


def wait_for(address: Address, seconds: float, look: Callable[[], None] = lambda: None) -> Answer:
    """Connect until the address answers or time is up; return the last answer. ``look`` is called between attempts."""
    deadline = time.monotonic() + seconds
    while True:
        answer = ask(address, min(_ATTEMPT_SECONDS, max(deadline - time.monotonic(), 0.2)))
        if answer is Answer.YES or time.monotonic() + _PAUSE_SECONDS > deadline:
            return answer
        look()
        time.sleep(_PAUSE_SECONDS)


def is_up(host: str) -> bool:
    """Return whether a host answers at any of a few ports, be it by a refusal."""
    with ThreadPoolExecutor(len(_KNOCKS)) as pool:
        answers = pool.map(lambda port: ask((host, port), _KNOCK_SECONDS), _KNOCKS)
        return any(answer in (Answer.YES, Answer.REFUSED) for answer in answers)
