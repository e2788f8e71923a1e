"""Executes a plan: streams base bytes through a kernel into output files, in bounded memory."""
