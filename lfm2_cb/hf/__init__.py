"""The connection to stock classes: registration, pipeline, manager, model methods."""
