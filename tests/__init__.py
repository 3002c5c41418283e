"""Tests of cubroker, by subject: real processes, real sockets and real bytes."""
