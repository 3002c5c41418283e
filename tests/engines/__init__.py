"""Tests with real engines, where those are installed: ``make engines``."""
