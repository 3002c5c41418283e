"""The protocol is pure data, so these tests need no process and no device."""
