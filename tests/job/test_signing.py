"""Only values that this job's ranks signed, for the name under which they stand, are believed."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from gradcomp.core.errors import ConfigError
from gradcomp.job.signing import HostSocket, Seal, SignedControl, agree_on_seal
from gradcomp.transport.control import LocalControl
from gradcomp.transport.inprocess import World

SECRET = b"the secret of this job"


@pytest.fixture(autouse=True)
def warnings_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test before has made of the logger."""
    monkeypatch.setattr(logging.getLogger("gradcomp"), "level", logging.WARNING)
    monkeypatch.setattr(logging.getLogger("gradcomp"), "propagate", True)
    logging.getLogger("gradcomp").manager._clear_cache()


def agree(given: list[bytes], one_host: bool = True) -> list[Seal | ConfigError | None]:
    """What the ranks get, or the error that they raise."""

    def of(transport, secret: bytes) -> Seal | ConfigError | None:
        try:
            return agree_on_seal(transport, one_host, secret)
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(len(given)) as ranks:
        return list(ranks.map(of, World(len(given)).transports(), given))


def test_a_signed_value_is_read_back() -> None:
    shared = LocalControl()
    SignedControl(shared, Seal(SECRET, b"job")).publish("abort", b"because")
    assert SignedControl(shared, Seal(SECRET, b"job")).lookup("abort") == b"because"
    assert SignedControl(shared, Seal(SECRET, b"job")).lookup("question") is None


@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(lambda signed: b"", id="nothing"),
        pytest.param(lambda signed: b"because", id="unsigned"),
        pytest.param(lambda signed: b"0" * 64 + signed[64:], id="another signature"),
        pytest.param(lambda signed: signed[:-1], id="cut"),
        pytest.param(lambda signed: signed + b"!", id="longer"),
        pytest.param(lambda signed: signed + bytes(1 << 20), id="enormous"),
        pytest.param(lambda signed: b"\xff" * 80, id="not text"),
        pytest.param(
            lambda _: Seal(b"another secret ", b"job").sign("abort", b"because"), id="another secret"
        ),
        pytest.param(lambda _: Seal(SECRET, b"earlier").sign("abort", b"because"), id="another job"),
        pytest.param(lambda _: Seal(SECRET, b"job").sign("question", b"because"), id="another name"),
        pytest.param(lambda _: Seal(SECRET, b"job").sign("abor", b"tbecause"), id="name and value shifted"),
    ],
)
def test_what_does_not_verify_is_not_there_and_reported_once(forge, caplog: pytest.LogCaptureFixture) -> None:
    seal, shared = Seal(SECRET, b"job"), LocalControl()
    shared.publish("abort", forge(seal.sign("abort", b"because")))
    control = SignedControl(shared, seal)
    assert [control.lookup("abort"), control.lookup("abort")] == [None, None]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "abort is not signed" in caplog.text


def test_ranks_with_one_secret_understand_each_other() -> None:
    seals = agree([SECRET, SECRET, SECRET], one_host=False)
    signed = seals[0].sign("key", b"value")
    assert [seal.open("key", signed) for seal in seals] == [b"value"] * 3


def test_ranks_of_one_host_get_rank_0s_secret() -> None:
    seals = agree([b"", b"", b""])
    signed = seals[2].sign("key", b"value")
    assert [seal.open("key", signed) for seal in seals] == [b"value"] * 3


@pytest.mark.parametrize("given", [b"", SECRET])
def test_the_values_of_an_earlier_job_with_the_same_secret_do_not_verify(given: bytes) -> None:
    earlier, now = agree([given, given])[0], agree([given, given])[0]
    assert now.open("key", earlier.sign("key", b"value")) is None


def test_a_secret_that_differs_or_is_missing_is_an_error_on_every_rank() -> None:
    for given in ([SECRET, SECRET, b"the secret of another"], [SECRET, SECRET, b""]):
        for error in agree(given, one_host=False):
            assert isinstance(error, ConfigError)
            assert "rank 2" in str(error)


def test_several_hosts_without_a_secret_are_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    assert agree([b"", b""], one_host=False) == [None, None]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "GRADCOMP_SECRET" in caplog.text


def test_a_host_whose_ranks_share_no_socket_is_warned_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HostSocket, "read", lambda _: None)
    assert agree([b"", b""]) == [None, None]
    assert "Unix socket" in caplog.text
    assert len(caplog.records) == 1


def test_a_socket_that_cannot_be_made_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: HostSocket, text: str) -> None:
        raise ConfigError("the name is taken")

    monkeypatch.setattr(HostSocket, "offer", refuse)
    assert agree([b"", b""]) == [None, None]
    assert "the name is taken" in caplog.text
