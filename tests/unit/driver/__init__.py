"""Tests of the driver layer. ``conformance`` runs unchanged on host devices (here) and on a GPU (``tests/gpu``)."""

import pytest

pytest.register_assert_rewrite(
    "tests.unit.driver.conformance", "tests.unit.driver.conformance_multicast", "tests.unit.driver.conformance_vmm"
)
