"""Doors to neighbouring projects, one folder each; importing one needs that project (`pip install lfm2-cb[name]`)."""
