"""Pools from other hosts: a service that exports them, and calls that fetch them, memory to memory.

``exporter`` serves, with a ``source_process`` for each peer; ``fetch`` fetches, by a ``fetch_process``. They speak
``messages`` over TLS (``connection``, ``identity``), and an ``engine`` moves the bytes.
``source_choice`` decides which hosts are read from, ``sources`` which piece from which; by ``announcements`` a
fetch has the exporter of its host pass on what it has.

Imports ``client`` and ``protocol``; imported by users and ``cli``.
"""
