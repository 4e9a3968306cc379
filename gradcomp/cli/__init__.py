"""The command ``gradcomp``: one file per command, which parses arguments and prints what other modules compute."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from gradcomp.cli.output import Exit
from gradcomp.core.errors import GradcompError
from gradcomp.core.plan import readable
from gradcomp.version import __version__

#: The module of each command, which holds a click command named ``command``. It is imported when it is used.
_COMMANDS = {
    "bench": "gradcomp.cli.bench",
    "doctor": "gradcomp.cli.doctor",
    "estimate": "gradcomp.cli.estimate",
    "mi": "gradcomp.cli.information",
    "plan": "gradcomp.cli.plan",
    "report": "gradcomp.cli.report",
    "store": "gradcomp.cli.store",
    "trace": "gradcomp.cli.trace",
}


class _Commands(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command: click.Command = import_module(_COMMANDS[name]).command
        return command


@click.command(cls=_Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="gradcomp %(version)s")
def command() -> None:
    """Data-parallel training with compressed gradient exchange: what it would gain, and where a step's time goes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; one line on stderr explains bad input."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal may not show all characters of layer names.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # Not command.main(), which gives a reader that leaves early an exit code of its own.
        with command.make_context(
            "gradcomp", list(sys.argv[1:] if arguments is None else arguments)
        ) as context:
            code = command.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as end:  # --help, --version
        return end.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "gradcomp"
        return _complain(f"{path}: {readable(error.format_message())} (try {path} --help)")
    except (click.ClickException, GradcompError, ModuleNotFoundError) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        return _complain(f"gradcomp: {readable(text)}")
    except (click.Abort, KeyboardInterrupt):
        return Exit.INTERRUPTED
    except BrokenPipeError:  # the reader left, as `| head` does; redirecting avoids another error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    return Exit.OK if code is None else int(code)


def _complain(line: str) -> int:
    sys.stderr.write(f"{line}\n")
    return Exit.BAD_INPUT
