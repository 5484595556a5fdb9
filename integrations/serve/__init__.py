"""An OpenAI-compatible HTTP server over one model and its engine. Extra `serve`; `lfm2-cb serve MODEL`."""

from .app import build_app
from .command import add_serve_arguments, main
from .running import serve

__all__ = ["add_serve_arguments", "build_app", "main", "serve"]
