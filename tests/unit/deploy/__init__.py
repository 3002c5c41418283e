"""What is shipped for running cubroker as a service."""
