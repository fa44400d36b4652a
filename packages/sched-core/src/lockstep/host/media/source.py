"""The bytes of a medium from its URL: in the URL itself, from a file of one folder, or over HTTP from listed hosts.

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

from lockstep.host.media.kinds import KINDS
from lockstep.host.media.processor import MediaError

REDIRECTS_MAX = 3
PIECE_BYTES = 1 << 16
SCHEMES = {"http": 80, "https": 443}
REDIRECTS = frozenset((301, 302, 303, 307, 308))


class MediaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the media of one request, and where they may come from.

    Args:
        images, audios, videos: of one request; 0: none.
        image_bytes, audio_bytes, video_bytes: of one of them as sent.
        image_pixels: width times height of one image.
        audio_seconds, video_seconds: length of one audio clip, of one video.
        video_frames: that a model gets of one video.
        video_pixels: of these frames together.
        fetch_s: time for one fetch, redirects included.
        folder: files below it may be read, by file:// URLs; None: no files.
        hosts: media may be fetched from these hosts; `*`: from all public ones; empty: from none.
        private: hosts may have private addresses; for tests.
    """

    images: int = 16
    image_bytes: int = 20 * 2**20
    image_pixels: int = 40_000_000
    audios: int = 8
    audio_bytes: int = 20 * 2**20
    audio_seconds: float = 600.0
    videos: int = 4
    video_bytes: int = 100 * 2**20
    video_seconds: float = 600.0
    video_frames: int = 128
    video_pixels: int = 300_000_000
    fetch_s: float = 10.0
    folder: str | None = None
    hosts: tuple[str, ...] = ()
    private: bool = False

    def most(self, kind: str) -> int:
        """Return how many of a kind a request may have."""
        return {"image": self.images, "audio": self.audios, "video": self.videos}[kind]

    def most_bytes(self, kind: str) -> int:
        """Return how many bytes one of a kind may have."""
        return {"image": self.image_bytes, "audio": self.audio_bytes, "video": self.video_bytes}[kind]


def read_media(kind: str, url: str, limits: MediaLimits) -> bytes:
    """Return the bytes of a medium. Raises MediaError."""
    scheme, source = url[:8].partition(":")[0].lower(), _Source(kind, limits)
    if scheme == "data":
        return source.data(url)
    if scheme == "file":
        return source.file(url)
    if scheme in SCHEMES:
        return source.fetched(url)
    raise MediaError(
        f"the URL must begin with data:{kind}/...;base64, or, if this server allows it, file:// or http(s)://"
    )


class _Source:
    """Reads the bytes of one medium within limits."""

    def __init__(self, kind: str, limits: MediaLimits) -> None:
        self._kind, self._limits = KINDS[kind], limits
        self._shown = f"the {self._kind.shown}"

    def _check_size(self, size: int) -> None:
        most = self._limits.most_bytes(self._kind.name)
        if size > most:
            raise MediaError(f"{self._shown} has more than {most:,} bytes ({self._kind.name}_bytes_max)")

    def data(self, url: str) -> bytes:
        """Return the bytes of a data URL. Raises MediaError."""
        head, comma, body = url.partition(",")
        start = f"data:{self._kind.name}/"
        if not comma or not head.lower().startswith(start) or not head.lower().endswith(";base64"):
            raise MediaError(f"a data URL must begin with {start}...;base64,")
        self._check_size(len(body) * 3 // 4 - 2)
        try:
            return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError) as error:
            raise MediaError(f"the data URL is not base64: {error}") from None

    def file(self, url: str) -> bytes:
        """Return the bytes of a file in the allowed folder. Raises MediaError."""
        folder = self._limits.folder
        if folder is None:
            raise MediaError("this server reads no files; the operator may allow a folder (--allowed-local-media-path)")
        parts = urlsplit(url)
        allowed, path = Path(folder).resolve(), Path(unquote(parts.path)).resolve()
        if parts.netloc not in ("", "localhost") or not path.is_relative_to(allowed) or not path.is_file():
            raise MediaError("there is no such file in the allowed folder")
        try:
            with path.open("rb") as file:
                found = file.read(self._limits.most_bytes(self._kind.name) + 1)
        except OSError as error:
            raise MediaError(f"the file cannot be read: {error.strerror}") from None
        self._check_size(len(found))
        return found

    def fetched(self, url: str) -> bytes:
        """Return the bytes that a host sends. Raises MediaError."""
        ends_s = time.monotonic() + self._limits.fetch_s
        for _ in range(REDIRECTS_MAX + 1):
            try:
                found = self._response(url, ends_s)
            except TimeoutError:
                raise MediaError(self._too_late()) from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise MediaError(f"{self._shown} cannot be fetched: {type(error).__name__}") from None
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise MediaError(f"{self._shown} cannot be fetched: more than {REDIRECTS_MAX} redirects")

    def _response(self, url: str, ends_s: float) -> bytes | str:
        """Return the body of one response, or the address of a redirect."""
        parts, limits, several = urlsplit(url), self._limits, self._kind.several
        host, default = (parts.hostname or "").lower(), SCHEMES.get(parts.scheme.lower())
        if not limits.hosts:
            raise MediaError(
                f"this server fetches no {several}; the operator may allow hosts (--allowed-media-domains)"
            )
        if default is None or not host or not ("*" in limits.hosts or host in limits.hosts):
            raise MediaError(
                f"{several} are not fetched from this host; the operator may allow it (--allowed-media-domains)"
            )
        port = parts.port or default
        address = _address(host, port, limits)
        connection = _Pinned(host, port, address, parts.scheme.lower() == "https", self._left(ends_s))
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"Accept": f"{self._kind.name}/*"})
            answer = connection.getresponse()
            if answer.status in REDIRECTS and (to := answer.getheader("Location")):
                return to
            if answer.status != 200:
                raise MediaError(f"{self._shown} cannot be fetched: its host answered {answer.status}")
            body = bytearray()
            while piece := answer.read1(PIECE_BYTES):
                body += piece
                self._check_size(len(body))
                connection.limit(self._left(ends_s))
            return bytes(body)
        finally:
            connection.close()

    def _left(self, ends_s: float) -> float:
        left = ends_s - time.monotonic()
        if left <= 0:
            raise MediaError(self._too_late())
        return left

    def _too_late(self) -> str:
        return f"{self._shown} cannot be fetched in time (media_fetch_s)"


def _address(host: str, port: int, limits: MediaLimits) -> str:
    """Return the address of a host. Raises MediaError if any of its addresses is not public."""
    found = [str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for one in found:
        address = ipaddress.ip_address(one.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        if not limits.private and not (mapped or address).is_global:
            raise MediaError("media are not fetched from this host: its address is not public")
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
