"""Pools from other hosts: a service that exports them, and calls that fetch them, memory to memory.

``exporter`` serves, with a ``source_process`` for each peer; ``fetch`` starts a ``fetch_process``. They exchange
``messages`` over TLS (``connection``, with ``certificates``), and a ``transfer_engine`` moves the bytes.
``source_choice`` decides which hosts are read from, ``striping`` which piece from which host. With ``announcements``, a
fetch tells the exporter of its own host which bytes other hosts can read already.

Imports ``client`` and ``protocol``; imported by users and ``cli``.
"""
