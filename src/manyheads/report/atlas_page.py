"""The page of an atlas: finder, heads and their examples, read from the files beside it."""

from html import escape

from manyheads.report.page import (
    SHARED_SCRIPTS,
    STYLES,
    WORD_SCRIPTS,
    content_hash,
    fill_page,
    join_scripts,
    read_part,
)

SCRIPTS = (
    *("russian_atlas.js", "chunks.js", "state.js", "address.js", "navigator.js"),
    *("finder.js", "head.js", "main.js"),
)


def render_atlas_page(name: str) -> str:
    """The page of the atlas of a model with that name.

    Its own script and styles may run, and scripts of the same folder, from disk or from a server;
    a browser that follows the page's content security policy runs and requests nothing else.
    """
    script = join_scripts((*SHARED_SCRIPTS, *WORD_SCRIPTS), SCRIPTS, "atlas")
    style = "".join(read_part(name, "pictures") for name in STYLES)
    style += read_part("style.css", folder="atlas")
    policy = (
        f"default-src 'none'; style-src {content_hash(style)}; "
        f"script-src {content_hash(script)} 'self' file:; base-uri 'none'; form-action 'none'"
    )
    values = {
        "policy": policy,
        "name": escape(name),
        "style": style,
        "script": script,
    }
    return fill_page(read_part("page.html", folder="atlas"), values)
