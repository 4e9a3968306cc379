"""``gradcomp store`` serves the key-value store in which the processes of an elastic job meet."""

from __future__ import annotations

import signal
import sys

import click

from gradcomp.core.errors import need


@click.command("store")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=29400, show_default=True, help="0: any free port."
)
def command(host: str, port: int) -> None:
    """Serve the store of an elastic job, until SIGTERM or Ctrl-C.

    Processes with GRADCOMP_STORE=HOST:PORT belong to the job. Since none of them serves the store, any of them may die.
    One job needs one store, and a later job another one.
    """
    need("gradcomp store", "torch", "torch")
    from gradcomp.job.jobstore import serve_alone  # it imports torch

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    served = serve_alone(host, port)
    try:  # whoever reads the address may end this at once
        click.echo(f"the store listens at {host}:{served.port}")
        sys.stdout.flush()
        signal.pause()
    except KeyboardInterrupt:
        return
