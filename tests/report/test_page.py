import json
import re
from html.parser import HTMLParser

from manyheads.report.page import compose
from tests.report.small import findings


class Seen(HTMLParser):
    """Every tag of a page with its attributes, and what stands inside scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts.append(data)


def page() -> str:
    return compose(findings(), where="some where", file="it's.txt", made="Today.")


def test_whatever_a_text_holds_is_harmless() -> None:
    seen = Seen(page())
    names = [tag for tag, _ in seen.tags]
    assert names.count("script") == 2
    assert "img" not in names
    assert not any(name.startswith("on") for _, given in seen.tags for name in given)
    data, script = seen.scripts
    assert "".join(json.loads(data)["tokens"]).startswith("</script><script>alert(1)")
    assert "alert" not in script
    assert "a &lt;b&gt;model&lt;/b&gt;" in page()


def test_nothing_is_asked_of_another_place() -> None:
    assert not re.search(r"(src|href)=\"(?!#)", page())
    assert "https://" not in page()
    assert "@import" not in page()
    assert "default-src 'none'" in page()


def test_every_head_has_a_row_a_pattern_and_a_value_of_each_measure() -> None:
    data = json.loads(Seen(page()).scripts[0])
    assert len(data["heads"]) == len(data["patterns"]) == 4
    assert all(len(each["values"]) == 4 for each in data["measures"])
    assert page().count('<th scope="row"') == 4


def test_nothing_is_left_to_be_filled_in() -> None:
    without_data = re.sub(r'<script type="application/json".*?</script>', "", page(), flags=re.S)
    assert "{{" not in without_data


def test_commands_name_what_was_given_as_a_shell_reads_it() -> None:
    assert "manyheads studio &#x27;some where&#x27;" in page()


def test_each_measure_says_how_it_was_made() -> None:
    data = json.loads(Seen(page()).scripts[0])
    assert all(len(each["how"]) > 20 for each in data["measures"])
    assert "arXiv 1905.10650" in page()
