"""The memory of a lease in this process: opened, mapped, put to sleep, unmapped.

Imports the session and the devices of ``client``, ``client.transport``, ``protocol`` and ``driver``; imported by the
client's classes alone.
"""
