"""Codecs: gradients as payloads that need not add, one file each, row by row and without communication."""
