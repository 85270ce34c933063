"""The passes of lowering, in the order in which they run."""
