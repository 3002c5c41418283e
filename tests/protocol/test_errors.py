"""The error classes and their codes."""

from __future__ import annotations

import pickle

import pytest

from cubroker.protocol import CubrokerError, errors

CODES = [
    "not_found",
    "exists",
    "denied",
    "over_budget",
    "over_quota",
    "out_of_memory",
    "unsupported",
    "invalid",
    "retired",
    "timeout",
    "unavailable",
    "device",
    "corrupted",
    "internal",
]


def test_the_codes_are_those_that_users_were_promised() -> None:
    assert list(errors.ERRORS) == CODES


@pytest.mark.parametrize("code", CODES)
def test_a_code_that_travelled_becomes_its_class_again(code: str) -> None:
    error = errors.from_code(code, "why")
    assert (type(error), error.code, error.message, str(error)) == (errors.ERRORS[code], code, "why", "why")


def test_a_code_of_a_later_version_is_kept_in_the_text() -> None:
    error = errors.from_code("too_hot", "the device is too hot")
    assert type(error) is CubrokerError
    assert str(error) == "the device is too hot [too_hot]"


def test_every_error_is_a_cubroker_error_and_none_hides_another() -> None:
    for one in errors.ERRORS.values():
        assert one.__mro__[1] is CubrokerError


def test_a_failure_that_is_kept_is_raised_anew_without_its_traceback() -> None:
    with pytest.raises(errors.Retired) as caught:
        raise errors.Retired("llama@1")
    again = caught.value.anew()
    assert (type(again), again.message) == (errors.Retired, "llama@1")
    assert caught.value.__traceback__
    assert again.__traceback__ is None


def test_errors_survive_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(errors.NotFound("no pool 'x'")))
    assert type(error) is errors.NotFound
    assert error.message == "no pool 'x'"
