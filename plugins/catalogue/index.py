"""Finds a wheel on the package indexes that pip is set to use.

It does not know models, and downloads nothing but an index's page of one project.
"""

import base64
import configparser
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import msgspec

from antiphon.plugins.catalogue.errors import CatalogueError

DEFAULT = "https://pypi.org/simple"
_PAGE_BYTES = 32 << 20
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


class Link(msgspec.Struct, frozen=True):
    """An address to fetch; user and password, if the index's address holds them, go in a header."""

    url: str
    authorization: str = ""

    @classmethod
    def of(cls, url: str) -> "Link":
        """Split ``https://user:password@host/...``. Raises CatalogueError: neither http(s) nor a file."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https", "file"):
            raise CatalogueError(f"index address {url!r} is neither http, https nor file")
        user, at, host = parts.netloc.rpartition("@")
        secret = base64.b64encode(urllib.parse.unquote(user).encode()).decode() if at else ""
        return cls(parts._replace(netloc=host).geturl(), f"Basic {secret}" if secret else "")

    def to(self, target: str) -> "Link":
        """A link found on this page; the password goes along only to the same host."""
        found = Link.of(urllib.parse.urljoin(self.url, target))
        same = urllib.parse.urlsplit(found.url)[:2] == urllib.parse.urlsplit(self.url)[:2]
        return msgspec.structs.replace(found, authorization=found.authorization or (self.authorization if same else ""))

    @property
    def shown(self) -> str:
        """The address for messages: no password, no fragment."""
        return urllib.parse.urldefrag(self.url).url

    def request(self) -> urllib.request.Request:
        """A request that keeps the password from hosts it is redirected to."""
        request = urllib.request.Request(self.shown, headers={"User-Agent": "antiphon"})  # noqa: S310 - see of()
        if self.authorization:
            request.add_unredirected_header("Authorization", self.authorization)
        return request


def locate(project: str, wheel: str, seconds: float) -> Link:
    """Address of the file ``wheel`` of ``project``: the first index that has it.

    Raises CatalogueError: none has it; tells for each index why.
    """
    reasons = []
    for address in indexes():
        page = Link.of(f"{address.rstrip('/')}/{project}/{'index.html' if address.startswith('file:') else ''}")
        try:
            link = _find(page, wheel, seconds)
        except (OSError, ValueError) as cause:  # HTTPError and URLError are OSErrors
            reasons.append(f"{page.shown}: {cause}")
            continue
        if link is not None:
            return link
        reasons.append(f"{page.shown}: has no {wheel}")
    raise CatalogueError(
        f"no package index has {wheel}. "
        + "; ".join(reasons or ["pip is told to use none (no-index)"])
        + ". Name one that"
        " has it in PIP_INDEX_URL, or put the wheel into a directory and name that in PIP_FIND_LINKS"
    )


def indexes() -> list[str]:
    """Addresses of package indexes in pip's order: PIP_* variables, else pip's configuration, else PyPI."""
    if _setting("no-index").lower() in ("1", "true", "yes", "on"):
        return []
    first = _setting("index-url") or DEFAULT
    return list(dict.fromkeys([first, *_setting("extra-index-url").split()]))


def find_links() -> list[Path]:
    """Local directories in which pip looks for wheels."""
    places = _setting("find-links").split()
    paths = [
        Path(urllib.request.url2pathname(urllib.parse.urlsplit(p).path)) if p.startswith("file:") else Path(p)
        for p in places
    ]
    return [path.expanduser() for path in paths if "://" not in str(path) and path.expanduser().is_dir()]


def _setting(name: str) -> str:
    value = os.environ.get("PIP_" + name.upper().replace("-", "_"))
    if value is not None:
        return value
    found = ""
    for file in _config_files():
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue  # pip itself will complain about it
        for section in ("global", "download"):  # later files and the command's own section win
            found = parser.get(section, name, fallback=found)
    return found


def _config_files() -> Iterator[Path]:
    """pip's files, the weakest first."""
    own = os.environ.get("PIP_CONFIG_FILE")
    if own == os.devnull:
        return
    for directory in reversed(os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")):
        yield Path(directory) / "pip/pip.conf"
    yield Path("/etc/pip.conf")
    yield Path("~/.pip/pip.conf").expanduser()
    yield Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "pip/pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if own:
        yield Path(own)


def _find(page: Link, wheel: str, seconds: float) -> Link | None:
    request = page.request()
    request.add_header("Accept", _ACCEPT)
    with urllib.request.urlopen(request, timeout=seconds) as answer:  # noqa: S310 - Link checked the scheme
        body = answer.read(_PAGE_BYTES)
        kind = answer.headers.get_content_type()
        page = msgspec.structs.replace(page, url=answer.geturl())
    if kind.endswith("json"):
        files = json.loads(body).get("files", [])
        addresses = [file["url"] for file in files if file.get("filename") == wheel]
    else:
        anchors = _Anchors()
        anchors.feed(body.decode("utf-8", "replace"))
        addresses = [a for a in anchors.found if urllib.parse.urlsplit(a).path.rpartition("/")[2] == wheel]
    return page.to(addresses[0]) if addresses else None


class _Anchors(HTMLParser):
    """Addresses of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]
