"""``cubroker doctor``: which kinds of sharing work here, and for the others why not and what to do.

``command`` gathers ``facts``, ``verdicts`` judges them without hardware. Everything that touches a driver runs in a
child process with a time limit: a driver that hangs must not end the report.
"""
