"""The benchmarks still run, and write what they say."""
