"""What survives a broker: its journal, and its descriptors, which the service manager keeps.

``sd_notify`` is the protocol of both sides; ``keeper`` imports it and nothing else of this folder. ``store`` is for the
broker. Imports ``protocol`` and the system calls of ``driver.system_calls``.
"""
