"""Broken files of every kind that is read: a value, or an error of our own, and nothing else."""
