"""LoRA files: the grammar of their keys, their modules, and the scale of each."""
