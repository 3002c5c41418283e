"""What cubroker costs and saves, measured beside what it stands in for. See README.md in this folder."""
