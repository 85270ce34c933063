"""Running a plan: the engine, its two runners, and the vote with which ranks end a step alike."""
