"""All that makes stock classes speak to us: registration, pipeline, manager, model methods."""
