"""Pages: every value is escaped, and a browser may run and load nothing."""

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from frostlab.html import POLICY, render
from fuzz.targets_pages import check_html


def test_every_value_is_escaped() -> None:
    evil = "</title><script>x()</script>\x1b\u202e\ud800\"'&"
    text = render('<p title="{{ a }}">{{ a }}</p>{{ b }}', title=evil, a=evil, b=Markup("<p>"))
    check_html(text)
    text.encode("utf-8")
    assert text.count(r"&lt;script&gt;x()&lt;/script&gt;\x1b\u202e\ud800&#34;&#39;&amp;") == 4
    assert "default-src 'none'" in POLICY
    assert "script" not in POLICY


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        render("{{ missing }}", title="a")
