"""Running a plan: the engine, its program and its steps, and the vote with which ranks end a step alike."""
