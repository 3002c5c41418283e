"""Loading: checkpoints into a new version of a pool, and the comparison of a pool with files.

Imports the client, its ``transport``, ``driver`` and ``protocol``. Imported by ``cli`` and by users; of ``client`` by
``publish``, which copies arrays as checkpoints are copied.
"""
