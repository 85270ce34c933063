"""The ways into a training loop: functional loops, torch's DDP, torch's hooks."""
