"""Checks against what others measured, against other tools, and against a real GPU. Not part of the course."""
