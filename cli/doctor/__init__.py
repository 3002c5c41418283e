"""``cubroker doctor``: what can be shared here and how, and if something cannot, why and what to do.

Facts are gathered first (``probe``, ``trials``, ``host``) and judged afterwards (``devices``, ``machine``), so that
every judgement can be shown without the hardware that it is about. Whatever touches a driver runs in a child process
with a time limit: a driver that hangs is something to report, and not the end of the report.
"""
