"""Prompts from a file, answers into a file, resumable at any instant."""
