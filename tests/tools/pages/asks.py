"""What every page must hold to: no request, valid nesting, no identifier twice."""

import re
from collections import Counter
from html.parser import HTMLParser

_VOID = {"meta", "link", "br", "hr", "img", "input"}


class _Nesting(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> at {self.getpos()}")


def check_page(html: str) -> None:
    """Assert that a page asks nobody for anything and is well formed."""
    assert not re.search(r"https?:|//[a-z]+\.|@import|<img|<iframe|fetch\(|xmlns", html)
    assert all(
        each.startswith(("#", "data:")) for each in re.findall(r'(?:href|src)="([^"]*)', html)
    )
    assert all(each.startswith("#") for each in re.findall(r"url\(([^)]*)", html))
    assert "default-src 'none'" in html
    assert "prefers-color-scheme:dark" in html
    assert "width=device-width" in html
    assert "Nothing here ran on a chip." in html
    twice = [
        name for name, count in Counter(re.findall(r' id="([^"]*)', html)).items() if count > 1
    ]
    assert not twice
    nesting = _Nesting()
    nesting.feed(html)
    assert not nesting.wrong
    assert not nesting.open
