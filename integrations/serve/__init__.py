"""An OpenAI-style HTTP server: transformers' own, over our engine. Extra `serve`; `lfm2-cb serve MODEL`."""

from .app import build_app, serve
from .command import add_serve_arguments, main

__all__ = ["add_serve_arguments", "build_app", "main", "serve"]
