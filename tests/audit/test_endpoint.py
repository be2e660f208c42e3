"""Two servers as a subject: a small server of OpenAI's completions on this machine, right or wrong."""

import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from specdec.audit.endpoint import EndpointSubject
from specdec.audit.laboratory import Settings, audit

WORDS = [" one", " two", " three", " four"]


class Server(ThreadingHTTPServer):
    """Greedy answers count on from the prompt; sampled ones are drawn by the seed. `wrong`: greedy ones skip a word."""

    def __init__(self, wrong=False, weights=(1, 1, 1, 1), tokens=True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.wrong, self.weights, self.tokens = wrong, weights, tokens
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def answer(self, body):
        rng, n = random.Random(body["seed"]), body["max_tokens"]
        if body["temperature"] == 0:
            words = [WORDS[(len(body["prompt"]) + i + (self.wrong and i > 4)) % 4] for i in range(n)]
        else:
            words = rng.choices(WORDS, self.weights, k=n)
        top = [{word: -0.5, WORDS[(WORDS.index(word) + 1) % 4]: -1.25} for word in words]
        logprobs = {"tokens": words, "top_logprobs": top} if self.tokens else None
        return {"choices": [{"text": "".join(words), "logprobs": logprobs}]}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({"data": [{"id": "m"}]} if self.path == "/v1/models" else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply(self.server.answer(body))

    def reply(self, document):
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def audited(on, off, **settings):
    return audit(Settings(endpoint=on.url, baseline=off.url, requests=5, tokens=12, **settings))


@pytest.mark.parametrize("tokens", [True, False])
def test_two_right_servers(tokens):
    with Server(tokens=tokens) as on, Server(tokens=tokens) as off:
        report = audited(on, off)
    assert report.passed and [c.level for c in report.checks] == [2, 3, 4]
    assert report.checks[0].found == "5 of 5 outputs identical"
    assert report.checks[1].status == "skipped"


def test_a_server_whose_greedy_text_differs():
    with Server(wrong=True) as on, Server() as off:
        report = audited(on, off, levels=(2,))
        assert report.red == {2}
        assert report.checks[0].found == "5 of 5 outputs differ, the first at token 5, widest margin 0.75"
        assert audited(on, off, levels=(2,), tolerance=0.4).passed  # two logits, 0.4 each: a near tie


def test_a_server_that_samples_another_distribution():
    with Server(weights=(4, 1, 1, 1)) as on, Server() as off:
        assert audited(on, off, levels=(4,)).red == {4}


def test_what_a_server_may_answer_wrongly():
    with Server() as server:
        with pytest.raises(ValueError, match="expected a JSON answer|refused"):
            EndpointSubject("http://127.0.0.1:1/v1", server.url)
        with pytest.raises(ValueError, match="the server lists no model"):
            EndpointSubject(server.url + "/nowhere", server.url)
