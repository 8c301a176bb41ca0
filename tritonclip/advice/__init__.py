"""Advice on limits: suggested from a recorded run, found by trying, drawn."""
