"""Servers of a teacher on real sockets, in the form of SGLang's `/generate`."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

Body = dict[str, Any]
Answer = Callable[[Body], Any]


@dataclass
class Server:
    """Answers by `answer`; an int of `statuses` is sent instead, each once."""

    answer: Answer
    statuses: list[int] = field(default_factory=list)
    seen: list[tuple[str, Body, str | None]] = field(default_factory=list)
    url: str = ""

    @property
    def bodies(self) -> list[Body]:
        return [body for _, body, _ in self.seen]


@contextmanager
def served(answer: Answer) -> Iterator[Server]:
    """Serve `answer` at a free port."""
    server = Server(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.seen.append((self.path, body, self.headers["Authorization"]))
            code = server.statuses.pop() if server.statuses else 200
            content = json.dumps(server.answer(body) if code == 200 else "busy").encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_port}"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def sglang(tokens: list[int], start: int, logprobs: list[float], texts: list[str]) -> Any:
    """SGLang's answer for `tokens` with these log-probs; the first that it returns is unknown to it."""
    values = [None, *logprobs[start + 1 :]]
    entries = [
        [value, *pair] for value, pair in zip(values, list(zip(tokens, texts, strict=True))[start:], strict=True)
    ]
    return {"text": "", "meta_info": {"prompt_tokens": len(tokens), "input_token_logprobs": entries}}


def scored_by(model: torch.nn.Module, tokenizer: Any = None) -> Answer:
    """Answer with the log-probs of a transformers model, and with the texts of its tokenizer if given."""

    def answer(body: Body) -> Any:
        tokens = body["input_ids"]
        with torch.no_grad():
            log_p = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1], dim=-1)
        picked = log_p.gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
        texts = ["" if tokenizer is None else tokenizer.decode([token]) for token in tokens]
        return sglang(tokens, body["logprob_start_len"], [0.0, *picked.tolist()], texts)

    return answer
