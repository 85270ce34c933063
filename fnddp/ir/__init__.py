"""The parts of plans."""
