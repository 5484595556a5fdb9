"""The arithmetic that is worth more than one implementation, each with a readable torch reference."""
