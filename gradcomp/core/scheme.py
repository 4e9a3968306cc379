"""Parses the names of reductions in settings: ``"ring"``, ``"parameter_server:servers=2,dedicated=true"``."""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.core.errors import ConfigError
from gradcomp.core.meant import closest

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
    """A reduction and its options: for a parameter server, how many ranks serve, and if they train as well.

    ``dedicated``: the first ``servers`` ranks do not train.
    """

    name: str
    servers: int = 1
    dedicated: bool = False

    def __str__(self) -> str:
        options = [f"servers={self.servers}"] * (self.servers != 1) + ["dedicated=true"] * self.dedicated
        return f"{self.name}:{','.join(options)}" if options else self.name

    def trainers(self, world: int) -> range:
        """Returns the ranks that train: all but dedicated servers. A single rank trains in any case.

        Raises ConfigError if no rank would be left to train.
        """
        if not self.dedicated or world == 1:
            return range(world)
        if self.servers >= world:
            raise ConfigError(
                f"{self.name}:servers={self.servers} needs 1 to {world - 1} dedicated servers among {world} ranks"
            )
        return range(self.servers, world)


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
        if name != "parameter_server" or key not in ("servers", "dedicated") or key in given:
            raise ConfigError(
                f"reduction {text!r}: only parameter_server has options, servers=1 or more and dedicated=true"
            )
        given[key] = value
    servers, dedicated = given.get("servers", "1"), given.get("dedicated", "false")
    if not (servers.isascii() and servers.isdecimal() and int(servers) > 0):
        raise ConfigError(f"reduction {text!r}: servers must be a whole number of at least 1")
    if dedicated not in ("true", "false"):
        raise ConfigError(f"reduction {text!r}: dedicated must be true or false")
    return Scheme(name, int(servers), dedicated == "true")
