"""The bytes of an image from its URL: in the URL itself, from a file of one folder, or over HTTP from listed hosts.

Files and HTTP are off unless the operator allows them. A fetch reaches public addresses only: the address of the host
is looked up once, checked, and connected to; redirects are checked in the same way. Size and time are bounded.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import socket
import ssl
import time
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import msgspec

from lockstep.host.media.processor import MediaError

REDIRECTS_MAX = 3
PIECE_BYTES = 1 << 16
SCHEMES = {"http": 80, "https": 443}
TOO_LATE = "the image cannot be fetched in time (media_fetch_s)"
REDIRECTS = frozenset((301, 302, 303, 307, 308))


class MediaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the images of one request, and where they may come from.

    Args:
        images: of one request; 0: none.
        image_bytes: of one image as sent.
        image_pixels: width times height of one image.
        fetch_s: time for one fetch, redirects included.
        folder: files below it may be read, by file:// URLs; None: no files.
        hosts: images may be fetched from these hosts; `*`: from all public ones; empty: from none.
        private: hosts may have private addresses; for tests.
    """

    images: int = 16
    image_bytes: int = 20 * 2**20
    image_pixels: int = 40_000_000
    fetch_s: float = 10.0
    folder: str | None = None
    hosts: tuple[str, ...] = ()
    private: bool = False


def read_image(url: str, limits: MediaLimits) -> bytes:
    """Return the bytes of an image. Raises MediaError."""
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        return _data(url, limits)
    if scheme == "file":
        return _file(url, limits)
    if scheme in SCHEMES:
        return _fetched(url, limits)
    raise MediaError(
        "the URL must begin with data:image/...;base64, or, if this server allows it, file:// or http(s)://"
    )


def _check_size(size: int, limits: MediaLimits) -> None:
    if size > limits.image_bytes:
        raise MediaError(f"the image has more than {limits.image_bytes:,} bytes (image_bytes_max)")


def _data(url: str, limits: MediaLimits) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.lower().startswith("data:image/") or not head.lower().endswith(";base64"):
        raise MediaError("a data URL must begin with data:image/...;base64,")
    _check_size(len(body) * 3 // 4 - 2, limits)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"the data URL is not base64: {error}") from None


def _file(url: str, limits: MediaLimits) -> bytes:
    if limits.folder is None:
        raise MediaError("this server reads no files; the operator may allow a folder (--allowed-local-media-path)")
    parts = urlsplit(url)
    allowed, path = Path(limits.folder).resolve(), Path(unquote(parts.path)).resolve()
    if parts.netloc not in ("", "localhost") or not path.is_relative_to(allowed) or not path.is_file():
        raise MediaError("there is no such file in the allowed folder")
    try:
        with path.open("rb") as file:
            found = file.read(limits.image_bytes + 1)
    except OSError as error:
        raise MediaError(f"the file cannot be read: {error.strerror}") from None
    _check_size(len(found), limits)
    return found


def _fetched(url: str, limits: MediaLimits) -> bytes:
    ends_s = time.monotonic() + limits.fetch_s
    for _ in range(REDIRECTS_MAX + 1):
        try:
            found = _response(url, limits, ends_s)
        except TimeoutError:
            raise MediaError(TOO_LATE) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise MediaError(f"the image cannot be fetched: {type(error).__name__}") from None
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise MediaError(f"the image cannot be fetched: more than {REDIRECTS_MAX} redirects")


def _response(url: str, limits: MediaLimits, ends_s: float) -> bytes | str:
    """Return the body of one response, or the address of a redirect."""
    parts = urlsplit(url)
    host, default = (parts.hostname or "").lower(), SCHEMES.get(parts.scheme.lower())
    if not limits.hosts:
        raise MediaError("this server fetches no images; the operator may allow hosts (--allowed-media-domains)")
    if default is None or not host or not ("*" in limits.hosts or host in limits.hosts):
        raise MediaError("images are not fetched from this host; the operator may allow it (--allowed-media-domains)")
    port = parts.port or default
    address = _address(host, port, limits)
    connection = _Pinned(host, port, address, parts.scheme.lower() == "https", _left(ends_s))
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path, headers={"Accept": "image/*"})
        answer = connection.getresponse()
        if answer.status in REDIRECTS and (to := answer.getheader("Location")):
            return to
        if answer.status != 200:
            raise MediaError(f"the image cannot be fetched: its host answered {answer.status}")
        body = bytearray()
        while piece := answer.read1(PIECE_BYTES):
            body += piece
            _check_size(len(body), limits)
            connection.limit(_left(ends_s))
        return bytes(body)
    finally:
        connection.close()


def _left(ends_s: float) -> float:
    left = ends_s - time.monotonic()
    if left <= 0:
        raise MediaError(TOO_LATE)
    return left


def _address(host: str, port: int, limits: MediaLimits) -> str:
    """Return the address of a host. Raises MediaError if any of its addresses is not public."""
    found = [str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for one in found:
        address = ipaddress.ip_address(one.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        if not limits.private and not (mapped or address).is_global:
            raise MediaError("images are not fetched from this host: its address is not public")
    return found[0]


class _Pinned(http.client.HTTPConnection):
    """A connection to an address that was checked, whatever the name of the host resolves to later."""

    def __init__(self, host: str, port: int, address: str, tls: bool, timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._address, self._tls, self._timeout_s = address, tls, timeout_s
        self._connected: socket.socket | None = None  # also behind the head of an answer that ends the connection

    def connect(self) -> None:
        """Connect to the address."""
        self.sock = socket.create_connection((self._address, self.port), self._timeout_s)
        if self._tls:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)
        self._connected = self.sock

    def limit(self, seconds: float) -> None:
        """Set the longest wait for the next bytes."""
        if self._connected is not None:
            self._connected.settimeout(seconds)
