"""Bridges to frameworks and inference engines: torch, transformers, vLLM, SGLang, Triton.

The bridges to engines use ``engine_loader``, ``runtime_pools`` and ``fingerprint``, which know no engine.

Imports ``client`` and ``protocol`` alone; imported by users.
"""
