"""A plan for its readers: as text, as a timeline, as a drawing, and timed while it runs."""
