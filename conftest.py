"""Files of an integration are collected where its peer is installed: `pip install 'fnddp[test]'` brings them all."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torchft") else ["fnddp/integrations/torchft/*"]
