"""What a user says → `Request`s, the same for every face."""
