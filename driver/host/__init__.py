"""A driver whose devices are host memory, in the shape of ``cuda.bindings.driver``; it needs no GPU.

``driver/driver.py`` imports it when host devices are asked for; ``cli.doctor`` names it to tell them from GPUs.

Processes share the bytes for real. As with a GPU, a process of the same network namespace can open a handle whose 64
bytes it knows, and any process a descriptor that it was given. Unlike with a GPU, a descriptor can be read-only.
Memory that is freed while other processes have it open stays theirs until they close it, and nothing is left on disk.
"""
