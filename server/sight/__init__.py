"""What operators see of a broker: the log of who did what, metrics, and a page to look at.

:class:`~cubroker.server.sight.observer.Sight` watches the ledger from the broker's loop. Everything else here runs on a
thread of its own, which asks that loop for a view now and then, so that whoever reads slowly, or asks for what there is
not, is no matter of the broker's.
"""
