"""Connects scheduling, which decides what runs, with the model, which computes it: token ids in, token ids out."""
