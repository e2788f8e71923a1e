"""Fused folders under FSDP2 and HSDP: plain torch, gloo on the CPU, a process for each rank."""
