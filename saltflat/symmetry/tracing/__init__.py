"""Trace a forward pass and record how every operation transforms the scales of its operands."""
