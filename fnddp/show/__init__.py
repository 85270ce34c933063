"""A plan for its readers: as text, as a timeline, and timed while it runs."""
