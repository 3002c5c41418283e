"""What takes long: stopped clients, leaks, load."""
