"""HTML that is escaped by construction: text becomes part of a page only through `tag`.

Owns: the difference between text and HTML. Invariants: every child and attribute that is not `Html` is escaped, and
control characters become visible signs, so nothing a model, a tool or a task says can act on the page that shows it.
Called by: `observe.{charts,transcripts,report,view}`. `page.css` and `page.js` are its assets.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_VOID = {"br", "meta", "col", "line", "rect", "circle", "path", "polyline"}  # drawn without children
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class Html(str):
    """A piece of a page, already escaped."""

    __slots__ = ()


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """The element `name`. Attributes: `class_` is class, `stroke_width` is stroke-width, True is a bare name.

    Children that are None are left out, iterables are flattened, everything but `Html` is escaped.
    """
    attrs = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID and not children:
        return Html(f"<{name}{attrs}/>")
    return Html(f"<{name}{attrs}>{join(children)}</{name}>")


def wide_table(*rows: Any, **attributes: Any) -> Html:
    """A table that scrolls by itself where the screen is narrower than it."""
    return tag("div", tag("table", rows, **attributes), class_="scroll")


def page(title: str, body: Any, links: Sequence[tuple[str, str]], *, live_s: float = 0.0) -> str:
    """A whole HTML document around `body`, with its style and its one script inside; `links` are (address, text).

    live_s: seconds between refreshes, 0 for none. A content security policy names the script's hash, so that even a
    hole in the escaping could not run another.
    """
    here = Path(__file__).parent
    script, style = (here / "page.js").read_text(), (here / "page.css").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} · springtide"),
        tag("style", Html(style)),
    )
    nav = tag("nav", [tag("a", text, href=href) for href, text in links])
    content = tag("body", nav, tag("main", body), tag("script", Html(script)), data_live=live_s or None)
    return f"<!doctype html>\n{tag('html', head, content, lang='en')}\n"


def join(children: Iterable[Any]) -> Html:
    """Children one after the other, escaped where they are not `Html`."""
    out: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, str) or not isinstance(child, Iterable):
            out.append(escaped(child))
        else:
            out.append(join(child))
    return Html("".join(out))


def escaped(value: Any) -> Html:
    """`value` as HTML: itself if it already is, else its text, escaped."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(visible(str(value))))


def visible(text: str) -> str:
    """`text` without what cannot be written or seen: control characters as their Unicode pictures."""
    text = text.encode("utf-8", "replace").decode()
    return _CONTROL.sub(lambda m: chr(0x2421 if m[0] == "\x7f" else 0x2400 + ord(m[0])), text)
