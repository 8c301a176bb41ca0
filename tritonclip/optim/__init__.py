"""The optimizer wrapper."""
