"""What keeps a serving engine from fusing a LoRA into a checkpoint that holds it already."""
