"""Writes plain data as YAML, with texts of several lines as blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from outsize.errors import BadOption


def yaml_text(*documents: Mapping[str, Any]) -> str:
    """Returns the documents in their order of keys, divided by `---`. Raises BadOption without PyYAML."""
    try:
        import yaml
    except ImportError:
        raise BadOption(
            "YAML is written by PyYAML, which is not installed", next_step="pip install 'outsize[clusters]'"
        ) from None

    @final
    class _Dumper(yaml.SafeDumper):
        """A dumper of this call alone: a representer is a fact of a class."""

        def ignore_aliases(self, data: Any) -> bool:
            """Writes equal data twice, since people read it."""
            return True

    def block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    _Dumper.add_representer(str, block)
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
