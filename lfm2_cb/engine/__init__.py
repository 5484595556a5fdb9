"""Joins the deciding side (scheduling) and the computing side (model): token ids in, token ids out."""
