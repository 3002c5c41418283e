"""Loading: checkpoints into a new version of a pool, and the comparison of a pool with files.

Imports the client, its ``transport``, ``driver`` and ``protocol``. Imported by ``cli`` and by users; within ``client``
by ``publish``, which copies arrays in the same way as checkpoints.
"""
