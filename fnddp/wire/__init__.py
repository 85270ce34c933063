"""Wires, which move bytes between ranks, and what ranks must agree on before."""
