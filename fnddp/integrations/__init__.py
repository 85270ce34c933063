"""Where people train: `lightning`, `huggingface`, `fsdp`, `checkpoint`. One file a peer, imported only by its users."""
