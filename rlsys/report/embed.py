"""How data and scripts get into one HTML file that needs nothing else.

Text of others is data here, never markup: JSON is written without "<", everything larger is gzip in base64, which the page
unpacks when it shows it. Scripts and styles are the package's own; the page's policy allows these two by their hashes and
nothing else, so that text which found its way into the markup all the same would be refused by the browser.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from rlsys.files import json_safe

_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w]+\.js)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|const|class) (\w+))", re.MULTILINE)


def compressed(value: Any) -> bytes:
    """`value` as JSON in gzip; the same value gives the same bytes."""
    return gzip.compress(_json(value).encode(), compresslevel=6, mtime=0)


def packed(value: Any) -> str:
    """`compressed`, in base64."""
    return base64.b64encode(compressed(value)).decode()


def inline_json(value: Any) -> str:
    """`value` as JSON that can stand within a script element: nothing in it closes or opens one."""
    return _json(value).replace("<", "\\u003c")


def bundle(modules: Mapping[str, str], main: str) -> str:
    """The script that runs module `main` and what it imports: file name -> source, `import { a, b } from "./name.js";`.

    Each module keeps a scope of its own. Raises ValueError for an import of a module or a name that is not there, for a
    circle, and for a form of import or export that is not understood.
    """
    names: dict[str, set[str]] = {}
    parts: list[str] = []

    def add(name: str, above: tuple[str, ...]) -> None:
        if name in names:
            return
        if name not in modules or name in above:
            raise ValueError(f"{name} is imported by {above[-1]}: it is missing, or imports that again.")
        source = modules[name]
        for wanted, other in _IMPORT.findall(source):
            add(other, (*above, name))
            if unknown := set(wanted.split(", ")) - names[other]:
                raise ValueError(f"{name} imports {', '.join(sorted(unknown))}, which {other} does not export.")
        exported = _EXPORT.findall(source)
        body = _EXPORT.sub("", _IMPORT.sub(r'const { \1 } = modules["\2"];', source))
        if re.search(r"^(import|export)\b", body, re.MULTILINE) or "</script" in body:
            raise ValueError(f"{name} holds an import, export or closing tag that cannot be put into a page.")
        names[name] = set(exported)
        parts.append(f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {", ".join(exported)} }};\n}})();\n')

    add(main, ())
    return '"use strict";\n(() => {\nconst modules = {};\n' + "".join(parts) + "})();\n"


def policy(script: str, style: str, live: bool) -> str:
    """The content security policy of a page with these two; `live` pages may ask where they came from."""
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError):  # Going through all of it beforehand takes twice as long as writing it.
        return json.dumps(json_safe(value), separators=(",", ":"), allow_nan=False)
