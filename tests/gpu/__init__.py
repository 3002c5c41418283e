"""Tests that need a GPU; without one, all of them are skipped."""
