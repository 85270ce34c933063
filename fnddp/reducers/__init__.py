"""Reducers: the innermost part of each pipeline, which communicates."""
