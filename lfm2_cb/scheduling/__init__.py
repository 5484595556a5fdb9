"""Decides which request runs in the next step and which cache blocks it owns. Never imports torch."""
