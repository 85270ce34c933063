"""Integrations: `lightning`, `huggingface`, `fsdp`, `checkpoint`, `torchft`. Import the ones that you use."""
