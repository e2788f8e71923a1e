"""Tensor arithmetic: one small function per kind of delta, and the one rounding at the end.

W' = round(float32(W) + sum_i scale_i * delta_i): sums in float32 (or float64 for the reference), in
the order given, rounded once, to nearest even.
"""
