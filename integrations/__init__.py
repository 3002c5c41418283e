"""Bridges to frameworks and inference engines: torch, transformers, vLLM, SGLang, Triton.

``runtime_pools`` and ``fingerprint``, which know no engine, are what the bridges to engines stand on.

Imports ``client`` and ``protocol`` alone; imported by users.
"""
