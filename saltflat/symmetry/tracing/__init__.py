"""Trace a forward pass: what every operation does to the scales of its operands."""
