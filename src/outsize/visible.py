"""Shows texts that a model, a file or another process has chosen, such that no character of them acts.

A name may hold an escape sequence that moves a terminal's cursor, a mark that turns the order of what
follows, or a line end that forges a line. `visible` writes such characters as JSON does: `\\u001b`, `\\n`.
"""

from __future__ import annotations

import json
from unicodedata import category


def visible(text: object, keep: str = "") -> str:
    """Returns a text with its control, format and separator characters escaped, but those to `keep`."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(one if _is_shown(one) or one in keep else json.dumps(one)[1:-1] for one in shown)


def visible_lines(text: object) -> str:
    """Returns a text of several lines with all but its line ends and tabs escaped."""
    return visible(text, keep="\n\t")


def _is_shown(one: str) -> bool:
    return one.isprintable() or category(one) == "Zs"
