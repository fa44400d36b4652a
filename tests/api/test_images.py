"""Images of requests: where they may come from, and hostile ones. Each ends with one error within the limits."""

from __future__ import annotations

import base64
import io
import random
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="images are decoded by Pillow")

import msgspec
from PIL import Image

from lockstep.host.media.content import array_of, content_of
from lockstep.host.media.images import decode_image
from lockstep.host.media.processor import MediaError
from lockstep.host.media.source import MediaLimits, read_media

LIMITS = MediaLimits(image_bytes=100_000, image_pixels=10_000, fetch_s=2.0)


def png(width: int = 8, height: int = 8) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (200, 10, 30)).save(out, "PNG")
    return out.getvalue()


def noise() -> bytes:
    """A PNG of some 20 KB."""
    out = io.BytesIO()
    Image.frombytes("RGB", (80, 80), random.Random(1).randbytes(3 * 80 * 80)).save(out, "PNG")
    return out.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG that claims so many pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def saved_as(form: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, form)
    return out.getvalue()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (bomb(40_000, 25_000), "pixels"),
        (bomb(2**31 - 1, 2**31 - 1), "pixels|cannot be decoded"),
        (png(101, 100), "101 x 100 pixels, at most 10,000"),
        (noise()[:5000], "cannot be decoded"),
        (b"", "cannot be decoded: it is none of PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be decoded: it is none of PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "cannot be decoded: it is none of PNG"),
        (saved_as("TIFF"), "cannot be decoded: it is none of PNG"),
        (b"BM" + bytes(60), "cannot be decoded"),
    ],
    ids=["10^9 pixels", "most pixels", "one row too many", "cut short", "nothing", "svg", "eps", "tiff", "bmp"],
)  # fmt: skip
def test_a_hostile_image_is_one_error(raw: bytes, why: str) -> None:
    began = time.monotonic()
    with pytest.raises(MediaError, match=why):
        decode_image(raw, LIMITS)
    assert time.monotonic() - began < 20


def test_images_become_rgb_upright_on_white() -> None:
    clear = Image.new("RGBA", (3, 2), (0, 0, 0, 0))
    out = io.BytesIO()
    clear.save(out, "PNG")
    assert decode_image(out.getvalue(), LIMITS).getpixel((0, 0)) == (255, 255, 255)
    turned, out = Image.new("RGB", (3, 2)), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(out, "JPEG", exif=exif)
    assert decode_image(out.getvalue(), LIMITS).size == (2, 3)
    frames, out = [Image.new("L", (4, 4), shade) for shade in (0, 255)], io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(out.getvalue(), LIMITS).getpixel((0, 0)) == (0, 0, 0)


def test_data_urls() -> None:
    body = base64.b64encode(png()).decode()
    assert read_media("image", f"data:image/png;base64,{body}", LIMITS) == png()
    for url, why in (
        ("data:text/html;base64,AA==", "must begin with data:image/"),
        ("data:image/png,plain", "must begin with data:image/"),
        ("data:image/png;base64,A*==", "not base64"),
        (f"data:image/png;base64,{'A' * 200_000}", "more than 100,000 bytes"),
        ("ftp://host/x.png", "must begin with data:image/"),
        ("", "must begin with data:image/"),
    ):
        with pytest.raises(MediaError, match=why):
            read_media("image", url, LIMITS)


def test_files_only_below_the_allowed_folder(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "a b.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png())
    (allowed / "link.png").symlink_to(tmp_path / "secret.png")
    (allowed / "large.png").write_bytes(bytes(100_001))
    limits = msgspec.structs.replace(LIMITS, folder=str(allowed))
    assert read_media("image", f"file://{allowed}/a%20b.png", limits) == png()
    for url, why in (
        (f"file://{tmp_path}/secret.png", "no such file"),
        (f"file://{allowed}/../secret.png", "no such file"),
        (f"file://{allowed}/%2e%2e/secret.png", "no such file"),
        (f"file://{allowed}/link.png", "no such file"),
        (f"file://{allowed}", "no such file"),
        (f"file://elsewhere{allowed}/a%20b.png", "no such file"),
        (f"file://{allowed}/large.png", "more than 100,000 bytes"),
    ):
        with pytest.raises(MediaError, match=why):
            read_media("image", url, limits)
    with pytest.raises(MediaError, match="reads no files"):
        read_media("image", f"file://{allowed}/a%20b.png", LIMITS)


@pytest.fixture
def host() -> Iterator[str]:
    """A host on loopback with images, redirects, and answers that do not end."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", self.path.removeprefix("/to/"))
                self.end_headers()
                return
            self.send_response(404 if self.path == "/none" else 200)
            self.end_headers()
            try:
                if self.path == "/large":
                    self.wfile.write(bytes(300_000))
                elif self.path == "/slow":
                    while not over.wait(0.05):
                        self.wfile.write(b"x")
                elif self.path == "/image":
                    self.wfile.write(png())
            except OSError:
                pass  # the client has left

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    over.set()
    server.shutdown()
    server.server_close()


def test_a_fetch_is_bounded(host: str) -> None:
    open_ones = msgspec.structs.replace(LIMITS, hosts=("127.0.0.1",), private=True, fetch_s=1.0)
    assert read_media("image", f"{host}/image", open_ones) == png()
    assert read_media("image", f"{host}/to//image", open_ones) == png()
    for url, why in (
        (f"{host}/none", "answered 404"),
        (f"{host}/large", "more than 100,000 bytes"),
        (f"{host}/slow", "in time"),
        (f"{host}/to//to//to//to//image", "more than 3 redirects"),
        (f"{host}/to/http://localhost/image", "not fetched from this host"),
        (f"{host}/to/file:///etc/hostname", "not fetched from this host"),
        ("http://127.0.0.1:1/", "cannot be fetched"),
    ):
        with pytest.raises(MediaError, match=why):
            read_media("image", url, open_ones)


def test_private_addresses_and_other_hosts_are_refused(host: str) -> None:
    with pytest.raises(MediaError, match="fetches no images"):
        read_media("image", f"{host}/image", LIMITS)
    listed = msgspec.structs.replace(LIMITS, hosts=("images.example",))
    with pytest.raises(MediaError, match="not fetched from this host; the operator"):
        read_media("image", f"{host}/image", listed)
    everywhere = msgspec.structs.replace(LIMITS, hosts=("*",))
    for url in (
        f"{host}/image",
        "http://[::1]/",
        "http://169.254.169.254/latest",
        "http://10.0.0.1/",
        "http://[::ffff:127.0.0.1]/",
    ):
        with pytest.raises(MediaError, match="not public"):
            read_media("image", url, everywhere)


def test_contents_are_equal_exactly_if_their_digests_are() -> None:
    one = content_of([5, 6], {"pixel_values": [[0.5, 1.0]]})
    assert one == content_of([5, 6], {"pixel_values": [[0.5, 1.0]]})
    others = [
        content_of([5, 7], {"pixel_values": [[0.5, 1.0]]}),
        content_of([5, 6], {"pixel_values": [[0.5], [1.0]]}),
        content_of([5, 6], {"pixels": [[0.5, 1.0]]}),
        content_of([5, 6], {"pixel_values": [[0.5, 2.0]]}),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 5
    assert one.size == 8
    assert array_of([[1, 2]]).numpy().tolist() == [[1, 2]]
    with pytest.raises(ValueError, match="object"):
        msgspec.structs.replace(array_of([1]), dtype="object")
