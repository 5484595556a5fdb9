"""LoRA adapters: PEFT's files read, kept in memory while requests use them, added to the rows that ask."""
