"""Outer steps, one file for each method or family."""
