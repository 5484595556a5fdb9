"""A user's call → `Request`s, the same for every interface."""
