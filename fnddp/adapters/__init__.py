"""Where pipelines meet the rest of the world: functional loops, torch's DDP, torch's hooks."""
