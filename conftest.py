"""Integrations whose peer is not installed have no doctests: they cannot be imported. `fnddp[test]` brings them all."""

from importlib.util import find_spec

_PEERS = {"huggingface.py": "accelerate", "lightning.py": "lightning", "torchft.py": "torchft"}

collect_ignore_glob = [f"fnddp/integrations/{files}" for files, peer in _PEERS.items() if find_spec(peer) is None]
