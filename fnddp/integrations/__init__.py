"""Where people train: `lightning`, `huggingface`, `fsdp`, `checkpoint`, `torchft`. Only who uses one imports it."""
