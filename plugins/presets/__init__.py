"""In-tree presets: config files that a deployment extends by name.

It does not know what they say.
"""

from pathlib import Path

OFFLOAD = Path(__file__).parent / "offload.toml"
STANDARD = Path(__file__).parent / "standard.toml"
