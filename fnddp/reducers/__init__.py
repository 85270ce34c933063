"""Leaves of a pipeline: where bytes leave the rank."""
