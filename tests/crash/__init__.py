"""A merge that is killed, interrupted or failed by the system at every call that writes."""
