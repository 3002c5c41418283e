"""A driver made of host memory: the shape of ``cuda.bindings.driver``, and no GPU.

``driver/driver.py`` imports it when host devices are asked for; ``cli.doctor`` names it to tell them from GPUs.

Processes share the bytes for real. As with a GPU, a process of the same network namespace can open a handle whose 64
bytes it knows, and any process a descriptor that it was given; unlike there, a descriptor can be for reading alone.
Memory that is freed while other processes have it open stays theirs until they close it, and nothing is left on disk.
"""
