"""An OpenAI-compatible HTTP server over one model and its engine. Extra `serve`; `lfm2-cb serve MODEL`."""

from .app import build_app
from .running import bind, serve, serve_on

__all__ = ["bind", "build_app", "serve", "serve_on"]
