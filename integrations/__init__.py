"""Bridges to frameworks: torch and transformers.

Imports ``client`` and ``protocol`` alone; imported by users.
"""
