"""The contract: what a pipeline is."""
