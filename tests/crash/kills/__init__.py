"""Worker processes that are killed: at every step of what a client does, and at any moment."""
