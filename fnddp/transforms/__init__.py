"""Additive transforms: their payloads add across ranks, so they wrap any pipeline."""
