"""The service as a process: signals and options."""

import os
import signal
from urllib.request import Request, urlopen

import pytest
import serve as benchmark
from commands import refused
from processes import Command
from served import BEARER, TOKEN

from gpq_faiss.indexes.opening import open_index


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_changes_stay_beside_the_index(built, index_file, tmp_path, number):
    content, port = index_file.read_bytes(), benchmark.free_port()
    call = ["serve", index_file, "--model", built / "model", "--data", "digits"]
    call += ["--writable", "--port", port]
    service = Command(*call, folder=tmp_path, GPQ_SERVE_TOKEN=TOKEN)
    benchmark.wait_for(port, service.is_alive)
    url = f"http://127.0.0.1:{port}/items/1234"
    urlopen(Request(url, method="DELETE", headers=BEARER)).close()
    os.kill(service.pid, number)
    code, _, log = service.ended()
    assert code == 0, log
    assert f"1,797 items at http://127.0.0.1:{port}/" in log
    assert index_file.read_bytes() == content
    assert open_index(index_file).code_of(1234) is None


OPTIONS = [
    ("--writable", 2, "--writable lets requests change the index: a token is needed"),
    ("--host 0.0.0.0", 2, "can be reached from other machines: a token is needed"),
    ("--host ::", 2, "can be reached from other machines: a token is needed"),
    (f"--host example.invalid --token {TOKEN}", 2, "cannot be bound"),
    ("--token short", 2, "at least 16"),
    ("--token ééééééééééééééééééééé", 2, "at least 16"),
    ("--port 70000", 2, "port = 70000"),
    ("--data nothing", 2, "unknown data"),
    ("--data features:none.npy", 1, "not found"),
]


@pytest.mark.parametrize(("options", "code", "message"), OPTIONS)
def test_a_wrong_option_is_one_line(built, options, code, message):
    call = ("serve", built / "index.faiss", "--port", 0, "--model", built / "model")
    assert message in refused(*call, *options.split(), code=code)


LIMITS = [
    ("max_upload = 'much'", "max_upload = 'much': could not parse"),
    ("max_k = 0", "max_k = 0: Input should be greater than or equal to 1"),
    ("max_q = 1", "max_q = 1: Extra inputs are not permitted"),
    ("max_k = '9'", "serve.toml: max_k = '9': Input should be a valid integer"),
    ("allowed_hosts = [1]", "allowed_hosts = 1: Input should be a valid string"),
    ("port = 1", "serve.toml: port belongs on the command line"),
]


@pytest.mark.parametrize(("line", "message"), LIMITS)
def test_a_wrong_limit_is_one_line(built, tmp_path, line, message):
    (tmp_path / "serve.toml").write_text(line)
    call = ("serve", built / "index.faiss", "--model", built / "model")
    assert message in refused(*call, "--config", tmp_path / "serve.toml", code=2)
