"""Differences of a norm's weight and bias, as LyCORIS names them; no alpha counts."""

from __future__ import annotations

from fuselora.kinds.difference import difference

W_NORM = difference("w_norm", r"\.w_norm", ".weight")
B_NORM = difference("b_norm", r"\.b_norm", ".bias")
