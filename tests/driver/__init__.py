"""Tests of the driver layer. ``conformance`` runs unchanged on host devices (here) and on a GPU (``tests/gpu``)."""

import pytest

pytest.register_assert_rewrite(
    "tests.driver.conformance", "tests.driver.conformance_multicast", "tests.driver.conformance_vmm"
)
