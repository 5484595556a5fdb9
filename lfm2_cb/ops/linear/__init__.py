"""Matrix products: dense and low-bit."""
