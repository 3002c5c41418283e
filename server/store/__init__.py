"""What survives a broker: the journal of its ledger, and its descriptors in the hands of the service manager.

``sd_notify`` is the protocol of both sides; ``keeper`` imports it and nothing else of this folder. The rest is for the
broker. Imports ``protocol`` and the system calls of ``driver.system_calls``.
"""
