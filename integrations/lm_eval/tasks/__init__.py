"""Tasks that run offline, and the documents they are made of."""
