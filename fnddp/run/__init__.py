"""Running a plan: the engine, its program and steps, and the vote that gives a step one outcome on all ranks."""
