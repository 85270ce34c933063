"""Schedules and structure: which pipeline runs when, and on which leaves."""
