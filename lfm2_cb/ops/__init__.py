"""Operations with more than one implementation, each with a readable torch reference."""
