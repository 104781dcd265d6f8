"""The page at `/`: one file, and a policy under which a browser runs nothing but what is in it."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

PAGE = Path(__file__).with_name("page.html")


def page_and_policy() -> tuple[str, str]:
    """The page, and its Content-Security-Policy."""
    text = PAGE.read_text(encoding="utf-8")
    parts = {
        "default-src": "'none'",
        "script-src": _hashes(text, "script"),
        "style-src": _hashes(text, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return text, "; ".join(f"{name} {value}" for name, value in parts.items())


def _hashes(text: str, tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
