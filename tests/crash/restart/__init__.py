"""The broker is killed, wherever it is, and whatever keeps its store fails it; nobody loses anything by that."""
