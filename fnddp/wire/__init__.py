"""Wires (they move bytes between ranks), process groups, and kinds of collectives."""
