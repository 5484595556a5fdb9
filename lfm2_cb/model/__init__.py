"""Computes: the LFM2 network and the tensors it reads and writes. Knows no request."""
