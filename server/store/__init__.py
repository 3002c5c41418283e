"""What survives a broker: the record of its ledger, and whoever keeps its descriptors while it is down."""
