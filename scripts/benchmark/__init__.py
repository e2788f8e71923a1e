"""The rooms of ``scripts/bench.py``: its inputs, what it starts, how it measures, and what it reports."""
