"""Tests of `cubroker doctor`."""
