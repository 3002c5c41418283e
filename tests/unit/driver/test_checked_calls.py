from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable

import pytest

from cubroker.driver import DriverError
from cubroker.driver.checked_calls import explained


class Memory:
    """What a caller has in a variable."""


def refused(texts: dict[str, str] | Callable[[], dict[str, str]]) -> tuple[str, weakref.ref[Memory]]:
    """Return what is said of a refused call, and the memory of whoever made the call."""
    memory = Memory()
    try:
        with explained(texts):
            raise DriverError("cuMemMap", 101, "CUDA_ERROR_INVALID_DEVICE", "asked with 1")
    except DriverError as error:
        return str(error), weakref.ref(memory)


@pytest.mark.parametrize(
    ("explains", "says"), [("CUDA_ERROR_INVALID_DEVICE", "out of reach"), ("CUDA_ERROR_INVALID_VALUE", "asked with 1")]
)
def test_a_refusal_is_told_in_the_words_for_it_and_keeps_nothing_of_its_callers(explains: str, says: str) -> None:
    gc.disable()
    try:
        texts = {explains: "out of reach"}
        for given in (texts, lambda: texts):
            told, memory = refused(given)
            assert memory() is None
            assert told == f"cuMemMap failed with CUDA_ERROR_INVALID_DEVICE (101): {says}"
    finally:
        gc.enable()


def test_the_words_go_with_a_refusal_to_another_process() -> None:
    with pytest.raises(DriverError) as caught, explained({"CUDA_ERROR_INVALID_DEVICE": "out of reach"}):
        raise DriverError("cuMemMap", 101, "CUDA_ERROR_INVALID_DEVICE", "asked with 1")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
