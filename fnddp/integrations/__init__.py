"""Where people train: `lightning`, `huggingface`, `fsdp`. One file for each peer, imported only by its users."""
