"""docs/vendor.py: pinned npm tarballs, from a registry of our own on this machine."""

import base64
import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from docs import vendor


def _tarball(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in files.items():
            data = text.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _integrity(data):
    return "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()


@pytest.fixture
def registry(monkeypatch):
    """A registry: .files maps a path to bytes or to an HTTP status, .asked lists what was asked for."""

    class Handler(BaseHTTPRequestHandler):
        files, asked = {}, []

        def do_GET(self):
            self.asked.append(self.path)
            found = self.files.get(self.path, 404)
            if isinstance(found, list):
                found = found.pop(0)
            if isinstance(found, int):
                self.send_error(found)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(found)))
            self.end_headers()
            self.wfile.write(found)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield Handler
    server.shutdown()
    server.server_close()


def test_fetches_once_and_then_asks_nobody(registry, tmp_path):
    data = _tarball({"package/a.js": "1", "package/deep/b.js": "2"})
    registry.files["/@scope/thing/-/thing-1.2.3.tgz"] = data
    folder = vendor.fetch("@scope/thing", "1.2.3", _integrity(data), tmp_path / "vendor")
    assert folder.name == "package"
    assert (folder / "deep" / "b.js").read_text() == "2"
    assert vendor.fetch("@scope/thing", "1.2.3", _integrity(data), tmp_path / "vendor") == folder
    assert len(registry.asked) == 1
    assert [p.name for p in (tmp_path / "vendor").iterdir()] == ["scope-thing-1.2.3"]  # no scratch left


def test_another_hash_is_refused_and_nothing_is_kept(registry, tmp_path):
    registry.files["/thing/-/thing-1.0.0.tgz"] = _tarball({"package/a.js": "swapped"})
    wanted = _integrity(_tarball({"package/a.js": "1"}))
    with pytest.raises(vendor.VendorError, match="not the file that is pinned") as caught:
        vendor.fetch("thing", "1.0.0", wanted, tmp_path / "vendor")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "vendor").exists()


def test_a_changed_pin_replaces_the_cached_copy(registry, tmp_path):
    for text in "12":
        data = _tarball({"package/a.js": text})
        registry.files["/thing/-/thing-1.0.0.tgz"] = data
        folder = vendor.fetch("thing", "1.0.0", _integrity(data), tmp_path)
        assert (folder / "a.js").read_text() == text


def test_an_unfinished_copy_is_fetched_again(registry, tmp_path):
    data = _tarball({"package/a.js": "1"})
    registry.files["/thing/-/thing-1.0.0.tgz"] = data
    (tmp_path / "thing-1.0.0" / "package").mkdir(parents=True)
    assert (vendor.fetch("thing", "1.0.0", _integrity(data), tmp_path) / "a.js").exists()


def test_a_server_error_is_tried_again(registry, tmp_path):
    data = _tarball({"package/a.js": "1"})
    registry.files["/thing/-/thing-1.0.0.tgz"] = [503, data]
    assert vendor.fetch("thing", "1.0.0", _integrity(data), tmp_path).is_dir()


@pytest.mark.parametrize(("files", "says"), [(None, "HTTP 404"), ({"other/a.js": "1"}, "no folder package/")])
def test_failures_are_one_line(registry, tmp_path, files, says):
    data = _tarball(files or {})
    if files:
        registry.files["/thing/-/thing-1.0.0.tgz"] = data
    with pytest.raises(vendor.VendorError, match=says) as caught:
        vendor.fetch("thing", "1.0.0", _integrity(data), tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_outside_the_folder(registry, tmp_path):
    data = _tarball({"package/a.js": "1", "package/../../evil.js": "2"})
    registry.files["/thing/-/thing-1.0.0.tgz"] = data
    with pytest.raises(vendor.VendorError, match="can't be unpacked"):
        vendor.fetch("thing", "1.0.0", _integrity(data), tmp_path / "vendor")
    assert not list(tmp_path.rglob("evil.js"))


def test_a_registry_that_is_down_says_what_to_set(monkeypatch, tmp_path):
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(vendor.VendorError, match="HTTPS_PROXY"):
        vendor.fetch("thing", "1.0.0", "sha512-x", tmp_path)
