"""Integrations whose peer is not installed have no doctests: they cannot be imported."""

from importlib.util import find_spec

_PEERS = {"huggingface": "accelerate", "lightning": "lightning"}

collect_ignore = [f"fnddp/integrations/{name}.py" for name, peer in _PEERS.items() if find_spec(peer) is None]
