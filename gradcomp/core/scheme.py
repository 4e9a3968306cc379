"""How reductions are named in settings: ``"ring"``, ``"parameter_server:servers=2"``."""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.core.errors import ConfigError

#: Every reduction, in the order of preference among equals.
NAMES = ("sra", "ring", "tree", "all_to_all", "gather", "parameter_server", "hierarchical")

#: The name that stands for the cheapest of them.
AUTO = "auto"


@dataclass(frozen=True)
class Scheme:
    """A reduction and what there is to choose about it: the number of servers of a parameter server."""

    name: str
    servers: int = 1

    def __str__(self) -> str:
        return f"{self.name}:servers={self.servers}" if self.servers != 1 else self.name


def parse(text: str) -> Scheme:
    """Read a string form; ConfigError if there is no such reduction or option."""
    name, _, options = text.partition(":")
    if name not in (*NAMES, AUTO):
        raise ConfigError(f"no reduction is named {name!r}; there are {', '.join(NAMES)} and {AUTO}")
    servers = 1
    if options or text.endswith(":"):
        key, _, value = options.partition("=")
        if name != "parameter_server" or key != "servers":
            raise ConfigError(f"reduction {text!r}: only parameter_server has an option, servers=1 or more")
        if not (value.isascii() and value.isdecimal() and int(value) > 0):
            raise ConfigError(f"reduction {text!r}: servers must be a whole number of at least 1")
        servers = int(value)
    return Scheme(name, servers)
