"""``fuselora check``: whether a folder is fused, is whole, and holds given LoRAs already."""
