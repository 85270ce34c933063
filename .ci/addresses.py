"""Metadata that depend on the public address: project URLs, and links of the README, absolute on a package index.

The address is `FNDDP_REPO_URL`, which mkdocs.yml reads too: a repository on GitHub or GitLab. Without it there are no
URLs, and links stay relative.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r'(\]\(|(?:src|href)=")(?!\w+:|#)([^)"\s]+)')


class Addresses(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text()
        if address := os.environ.get("FNDDP_REPO_URL", "").rstrip("/"):
            tag = f"v{metadata['version']}"

            def absolute(link: re.Match[str]) -> str:
                kind = "raw" if link[2].endswith((".svg", ".png")) else "blob"
                return f"{link[1]}{address}/{kind}/{tag}/{link[2]}"

            text = LINK.sub(absolute, text)
            metadata["urls"] = {
                "Source": address,
                "Documentation": f"{address}/blob/{tag}/docs/index.md",
                "Changelog": f"{address}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
