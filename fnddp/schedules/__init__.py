"""Schedules and structure: choose the pipeline of each step and each leaf."""
