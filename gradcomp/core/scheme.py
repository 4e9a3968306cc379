"""Parses the names of reductions in settings: ``"ring"``, ``"parameter_server:servers=2"``."""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.core.errors import ConfigError
from gradcomp.core.strings import closest

_names: list[str] = []

#: The name that stands for the cheapest reduction.
AUTO = "auto"

#: Other names of reductions, for suggestions.
_WORDS = {
    "ps": "parameter_server",
    "allreduce": "ring",
    "allgather": "gather",
    "scatter_reduce_allgather": "sra",
}


def register(name: str) -> None:
    """Registers the name of a reduction; ConfigError if it is taken."""
    if name in (*_names, AUTO):
        raise ConfigError(f"there is a reduction named {name!r} already")
    _names.append(name)


def names() -> tuple[str, ...]:
    """Returns every reduction in the order of registration, by which equally cheap ones are preferred."""
    return tuple(_names)


@dataclass(frozen=True)
class Scheme:
    """A reduction and its option: the number of a parameter server's servers."""

    name: str
    servers: int = 1

    def __str__(self) -> str:
        return self.name if self.servers == 1 else f"{self.name}:servers={self.servers}"


def parse(text: str) -> Scheme:
    """Parses a string form; ConfigError if there is no such reduction or option."""
    name, _, options = text.partition(":")
    if name not in (*_names, AUTO):
        meant = closest(name, [*_names, AUTO, *_WORDS])
        said = f" (did you mean {_WORDS.get(meant, meant)!r}?)" if meant else ""
        raise ConfigError(f"no reduction is named {name!r}{said}; there are {', '.join(_names)} and {AUTO}")
    given: dict[str, str] = {}
    for option in options.split(",") if options or text.endswith(":") else ():
        key, _, value = option.partition("=")
        if name == "parameter_server" and key == "dedicated":
            raise ConfigError(
                f"reduction {text!r}: dedicated servers are no longer supported; parameter_server:servers=k has k "
                "servers that train as well, and every rank runs the same script"
            )
        if name != "parameter_server" or key != "servers" or key in given:
            raise ConfigError(f"reduction {text!r}: only parameter_server has an option, servers=1 or more")
        given[key] = value
    servers = given.get("servers", "1")
    if not (servers.isascii() and servers.isdecimal() and int(servers) > 0):
        raise ConfigError(f"reduction {text!r}: servers must be a whole number of at least 1")
    return Scheme(name, int(servers))
