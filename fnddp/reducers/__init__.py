"""Reducers: the innermost part of each pipeline. They communicate."""
