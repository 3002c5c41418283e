"""What cubroker costs and saves, measured beside the alternatives. See README.md in this folder."""
