"""Where files may come from: data: URLs, allowed web hosts, the media root; and every way around that is closed."""

from __future__ import annotations

import base64
import ipaddress
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.media import address
from runtime.media.source import MediaPolicy, fetch
from runtime.refusal import RequestError

CONTENT = b"\x89PNG and the rest"
WHERE = "references[2]"
HOST = "media.test"
LOOPBACK = ipaddress.ip_network("127.0.0.0/8")


class Handler(BaseHTTPRequestHandler):
    """A server that misbehaves by path."""

    def do_GET(self) -> None:
        name = self.path[1:].partition("?")[0]
        getattr(self, f"send_{name}")()

    def send_file(self) -> None:
        self.answer(CONTENT)

    def send_host(self) -> None:
        self.answer(self.headers["Host"].encode())

    def send_moved(self) -> None:
        self.send_response(302)
        self.send_header("Location", self.path.partition("?")[2])
        self.end_headers()

    def send_gzip(self) -> None:
        self.answer(CONTENT, {"Content-Encoding": "gzip"})

    def send_missing(self) -> None:
        self.send_error(404)

    def send_short(self) -> None:
        self.answer(CONTENT, {"Content-Length": "1000"})

    def send_announced(self) -> None:
        self.answer(b"", {"Content-Length": str(1 << 40)})

    def send_endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            while not self.server.stopped.is_set():
                self.wfile.write(bytes(1 << 20))
        except OSError:
            return

    def send_dripping(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            while not self.server.stopped.wait(0.02):
                self.wfile.write(b".")
        except OSError:
            return

    def send_dripping_headers(self) -> None:
        try:
            self.wfile.write(b"HTTP/1.0 200 OK\r\nX: ")
            while not self.server.stopped.wait(0.02):
                self.wfile.write(b".")
        except OSError:
            return

    def answer(self, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.stopped = threading.Event()
    server.daemon_threads = True
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving() as port:
        yield port


def allowing(port: int, *others: str) -> MediaPolicy:
    """A policy for the local server, under a name that no resolver knows."""
    hosts = (f"{HOST}:{port}", *others)
    return MediaPolicy(url_hosts=hosts, networks=(LOOPBACK,), resolver=lambda host, port: ["127.0.0.1"], seconds=20)


def refused(source: str, policy: MediaPolicy) -> str:
    with pytest.raises(RequestError) as caught:
        fetch(source, "image", policy, WHERE)
    assert caught.value.field == WHERE
    return str(caught.value)


@given(st.binary(min_size=1, max_size=300))
def test_a_data_url_gives_its_bytes(content: bytes) -> None:
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    assert fetch(source, "image", MediaPolicy(), WHERE) == content


@pytest.mark.parametrize(
    "source",
    [
        "data:image/png;base64,AAA",
        "data:image/png;base64,AA A=",
        "data:image/png;base64,AAAA\n",
        "data:image/png;base64,AA-_",
        "data:image/png;base64,AAAA====",
        "data:image/png;base64,Aé==",
        "data:image/png,AAAA",
        "data:image/png;base64",
        "data:;base64,",
        "DATA:",
    ],
)
def test_a_data_url_is_strict(source: str) -> None:
    refused(source, MediaPolicy())


def test_a_data_url_is_measured_before_it_is_unpacked() -> None:
    size = 30 * 1024 * 1024
    source = "data:;base64," + "A" * (size // 3 * 4 + 4)
    assert f"got '{size + 3} bytes'" in refused(source, MediaPolicy())


@pytest.mark.parametrize(
    "source",
    [
        "https://example.org/a.png",
        "http://127.0.0.1/a.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "etc/passwd",
        "ftp://example.org/a.png",
        "gopher://127.0.0.1:70/_",
        "concat:/etc/passwd|/etc/hosts",
        "",
    ],
)
def test_by_default_nothing_but_data_urls_is_fetched(source: str) -> None:
    def never(host: str, port: int) -> list[str]:
        raise AssertionError("resolved a name")

    assert "must be" in refused(source, MediaPolicy(resolver=never))


def test_an_allowed_host_is_fetched_from(port: int) -> None:
    assert fetch(f"http://{HOST}:{port}/file", "image", allowing(port), WHERE) == CONTENT
    assert fetch(f"http://{HOST}:{port}/host", "image", allowing(port), WHERE) == f"{HOST}:{port}".encode()


def test_names_below_a_wildcard_are_allowed_and_no_others(port: int) -> None:
    policy = replace(allowing(port), url_hosts=(f"*.{HOST}:{port}",))
    assert fetch(f"http://a.b.{HOST}:{port}/file", "image", policy, WHERE) == CONTENT
    for host in (HOST, f"evil{HOST}", f"{HOST}.evil.test", "evil.test"):
        assert "operator allows" in refused(f"http://{host}:{port}/file", policy)


@pytest.mark.parametrize(
    "url",
    [
        "http://media.test/file",
        "http://media.test:1/file",
        "http://other.test:{port}/file",
        "http://user@media.test:{port}/file",
        "http://media.test:{port}@other.test/file",
        "http://other.test\\@media.test:{port}/file",
        "http://media.test:{port}\t/file",
        "http://media.test:99999/file",
        "http://media.test:x/file",
        "http://[::1/file",
        "http:///file",
        "https:file",
        "http://medi\u0430.test:{port}/file",
    ],
)
def test_a_url_of_another_host_port_or_form_is_refused(url: str, port: int) -> None:
    assert "must " in refused(url.format(port=port), allowing(port))


@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "0177.0.0.1", "0x7f.1", "localhost"])
def test_another_spelling_of_this_machine_is_refused_even_where_an_operator_wrote_it_down(host: str) -> None:
    """Really resolved: whatever the spelling means, its address is not public."""
    assert "public addresses only" in refused(f"http://{host}/file", MediaPolicy(url_hosts=(host,), seconds=5))


@pytest.mark.parametrize("host", ["[::1]", "[::ffff:127.0.0.1]"])
def test_an_ipv6_address_is_no_host_name(host: str) -> None:
    assert "operator allows" in refused(f"http://{host}/file", MediaPolicy(url_hosts=(host, host.strip("[]"))))


PRIVATE = [
    "127.0.0.1",
    "10.0.0.1",
    "172.16.5.5",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "192.0.2.1",
    "198.18.0.1",
    "::1",
    "::",
    "fe80::1",
    "fec0::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "2001:db8::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::",
    "2002:a9fe:a9fe::1",
    "2001:0:7f00:1::",
    "no address",
]


@pytest.mark.parametrize("text", PRIVATE)
def test_a_name_with_any_private_address_is_refused(text: str, port: int) -> None:
    for found in ([text], ["93.184.215.14", text], [text, "93.184.215.14"]):
        policy = replace(allowing(port), networks=(), resolver=lambda host, port, found=found: found)
        assert "public addresses only" in refused(f"http://{HOST}:{port}/file", policy)


@pytest.mark.parametrize("text", ["93.184.215.14", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_are_allowed(text: str) -> None:
    assert address.is_allowed(text, ())


def test_the_address_that_was_checked_is_the_one_that_is_connected_to(port: int) -> None:
    """A name that changes its address after the check (DNS rebinding) changes nothing: it is resolved once."""
    asked = []

    def rebinding(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    policy = replace(allowing(port), resolver=rebinding)
    assert fetch(f"http://{HOST}:{port}/file", "image", policy, WHERE) == CONTENT
    assert asked == [HOST]


def test_a_redirect_within_allowed_hosts_is_followed(port: int) -> None:
    assert fetch(f"http://{HOST}:{port}/moved?/file", "image", allowing(port), WHERE) == CONTENT


@pytest.mark.parametrize(
    "target",
    ["http://127.0.0.1:{port}/file", "http://169.254.169.254/latest", "file:///etc/passwd", "//other.test/", ""],
)
def test_a_redirect_elsewhere_is_refused(target: str, port: int) -> None:
    assert "must " in refused(f"http://{HOST}:{port}/moved?{target.format(port=port)}", allowing(port))


def test_a_redirect_of_an_allowed_host_into_a_private_network_is_refused(port: int) -> None:
    inside = {HOST: "127.0.0.1", "inside.test": "10.0.0.1"}
    policy = replace(allowing(port, "inside.test"), resolver=lambda host, port: [inside[host]])
    assert "public addresses only" in refused(f"http://{HOST}:{port}/moved?http://inside.test/", policy)


def test_redirects_in_a_circle_end(port: int) -> None:
    """The server repeats the query, so that each redirect leads to the same one."""
    assert "after at most 3 redirects" in refused(f"http://{HOST}:{port}/moved?", allowing(port))


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("missing", "answers 404"),
        ("gzip", "compresses"),
        ("short", "983 more expected"),
        ("announced", "announces 1099511627776 bytes"),
        ("endless", "sends more than 31457280 bytes"),
    ],
)
def test_a_server_that_misbehaves_is_named_as_the_cause(path: str, cause: str, port: int) -> None:
    assert cause in refused(f"http://{HOST}:{port}/{path}", allowing(port))


@pytest.mark.parametrize("path", ["dripping", "dripping_headers"])
def test_a_server_that_drips_is_cut_off_at_the_deadline(path: str, port: int) -> None:
    policy = replace(allowing(port), seconds=0.3)
    assert "took longer" in refused(f"http://{HOST}:{port}/{path}", policy)


def test_a_host_without_an_address_and_a_port_that_nobody_serves_are_refused(port: int) -> None:
    def unknown(host: str, port: int) -> list[str]:
        raise OSError("no such host")

    assert "must have an address" in refused(f"http://{HOST}:{port}/file", replace(allowing(port), resolver=unknown))
    assert "must be fetched" in refused(f"http://{HOST}:1/file", allowing(1))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of the test host that nobody has signed but itself, with its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    names = ["-subj", f"/CN={HOST}", "-addext", f"subjectAltName=DNS:{HOST}"]
    command = [
        openssl,
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        *names,
        "-keyout",
        path,
        "-out",
        path,
    ]
    subprocess.run([*command[:-1], path.with_suffix(".crt")], check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def secure(certificate: Path) -> Iterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.with_suffix(".crt"), certificate)
    with serving(context) as port:
        yield port


def test_a_certificate_is_checked_for_the_name_and_not_the_address(
    secure: int, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = allowing(secure, f"other.test:{secure}")
    assert "CERTIFICATE_VERIFY_FAILED" in refused(f"https://{HOST}:{secure}/file", policy)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
    assert fetch(f"https://{HOST}:{secure}/file", "image", policy, WHERE) == CONTENT
    assert "must be fetched" in refused(f"https://other.test:{secure}/file", policy)


def test_a_redirect_does_not_leave_https(
    secure: int, certificate: Path, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
    policy = allowing(secure, f"{HOST}:{port}")
    assert "must not leave https" in refused(f"https://{HOST}:{secure}/moved?http://{HOST}:{port}/file", policy)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A media root with a file in it, and a secret beside it."""
    (tmp_path / "secret").write_bytes(b"secret")
    inside = tmp_path / "media" / "below"
    inside.mkdir(parents=True)
    (inside / "a b.png").write_bytes(CONTENT)
    (inside / "link").symlink_to("a b.png")
    (inside / "out").symlink_to(tmp_path / "secret")
    (inside / "up").symlink_to(tmp_path)
    os.mkfifo(inside / "pipe")
    return tmp_path / "media"


@pytest.mark.parametrize("source", ["below/a b.png", "below/../below/a b.png", "below/link", "./below//a b.png"])
def test_a_path_below_the_media_root_is_read(source: str, root: Path) -> None:
    assert fetch(source, "image", MediaPolicy(root=root), WHERE) == CONTENT


@pytest.mark.parametrize(
    "source",
    [
        "../secret",
        "below/../../secret",
        "below/out",
        "below/up/secret",
        "/etc/passwd",
        "below",
        "below/pipe",
        "below/none.png",
        "below/a%20b.png",
        "below/a b.png\0",
        "a" * 5000,
        "file:below/a b.png",
    ],
)
def test_no_path_leads_out_of_the_media_root(source: str, root: Path) -> None:
    assert "below the media root" in refused(source, MediaPolicy(root=root))


def test_a_file_below_the_root_is_measured_before_it_is_read(root: Path) -> None:
    with (root / "large.png").open("wb") as file:
        file.truncate(1 << 40)
    assert "1099511627776 bytes" in refused("large.png", MediaPolicy(root=root))
