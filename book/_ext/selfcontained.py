"""Sphinx extension: the built site asks no other host for anything.

Scripts are copied into ``_static/vendor`` after the build, not put into the book's own ``_static``: Jupyter Book loads
every script that lies there on every page.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import vendor


def disconnect_thebe(app, config) -> None:
    """Take out sphinx-thebe, which Jupyter Book always loads: its script comes from a CDN and throws on every page."""
    for listeners in list(app.events.listeners.values()):
        for listener in list(listeners):
            # Its static folder stays: the style sheet it has already registered must exist.
            if listener.handler.__module__ == "sphinx_thebe" and listener.handler.__name__ != "st_static_path":
                app.disconnect(listener.id)


def copy_scripts(app, exception) -> None:
    if exception is None and app.builder.format == "html":
        vendor.install(Path(app.outdir) / "_static" / "vendor")


def setup(app) -> dict:
    app.connect("config-inited", disconnect_thebe)
    app.connect("build-finished", copy_scripts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
