"""What cubroker costs and saves, measured in comparison with the alternatives. See README.md in this folder."""
