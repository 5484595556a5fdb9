"""Integrations with other projects, a folder each; importing one needs that project (`pip install lfm2-cb[name]`)."""
