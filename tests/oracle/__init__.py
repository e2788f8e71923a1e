"""Merge results against other people's code: diffusers' and PEFT's own arithmetic, names and loaders."""
