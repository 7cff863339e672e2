"""Checks against what others measured, against other tools and a real GPU. Not part of the course."""
