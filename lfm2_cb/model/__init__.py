"""The LFM2 network, and the tensors that it reads and writes. Requests are unknown here."""
