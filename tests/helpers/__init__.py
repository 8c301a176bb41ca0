"""Modules that the tests share."""
