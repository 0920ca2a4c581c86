"""Translates the requests and answers of the gateway: OpenAI's Chat Completions, Completions and Responses, and
Anthropic's Messages. Pure.

A format reads a request into `Asked` and writes a `Reply`, whole or as server-sent events. In training, what a request
would change about sampling is refused by name, because training needs the distribution from which a token was drawn; see
`SamplingRule`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from time import time
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from rlsys.files import require_shallow
from rlsys.rollout.agent.chat_recorder import Asked, Refused, Reply
from rlsys.rollout.agent.conversation_tree import Message
from rlsys.rollout.agent.recorder import TurnSampling
from rlsys.rollout.agent.tokens import Codec, encodable, encodable_json

MODEL = "policy"
"""Name of the model."""
MOST_STOPS = 16
_HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "stream_options", "service_tier", "safety_identifier", "include"),
        *("prompt_cache_key", "prompt_cache_retention", "cache_control"),
    }
)
"""Fields that change nothing about an answer."""
_NEUTRAL: Mapping[str, Sequence[JsonValue]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", {"type": "auto"}),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}}, {}),
    "thinking": ({"type": "disabled"},),
    "modalities": (["text"],),
    "background": (False,),
    "echo": (False,),
    "suffix": ("",),
    "truncation": ("disabled",),
}
"""Field -> values that leave sampling as it is."""


class SamplingRule(Enum):
    """Treatment of the sampling that a request asks for."""

    fixed = auto()
    """It is refused by name, unless it is the session's own."""
    ignored = auto()
    asked = auto()
    """Temperature, top_p and top_k are applied. What no engine here knows is refused by name."""


class _Body(BaseModel):
    """Request body. Fields that it does not name are read by `require_settled`."""

    model_config = ConfigDict(extra="allow", strict=True, hide_input_in_errors=True)

    model: str = MODEL
    stream: bool | None = False


class _Sampling(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    temperature: float | None = Field(default=None, ge=0, le=10, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1, le=1 << 30), AfterValidator(lambda count: count or -1)] | None = None
    """0 is the whole vocabulary, as -1 is. Engines hold the number in 32 bits."""


class _Function(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None


class _ChatTool(BaseModel):
    type: Literal["function"]
    function: _Function


class _CalledFunction(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    arguments: str


class _ChatCall(BaseModel):
    id: str = ""
    function: _CalledFunction


class _Part(BaseModel):
    type: Literal["text", "input_text", "output_text"]
    text: str


_Content = str | list[_Part] | None


class _ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content = None
    tool_calls: list[_ChatCall] | None = None
    tool_call_id: str | None = None


class _ChatBody(_Body):
    messages: list[_ChatMessage] = Field(min_length=1)
    tools: list[_ChatTool] | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False


class _TextBody(_Body):
    prompt: str
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=0)


class _Item(BaseModel):
    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _Content = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: _Content = None


class _ResponsesTool(_Function):
    type: Literal["function"]


class _ResponsesBody(_Body):
    input: str | list[_Item]
    instructions: str | None = None
    tools: list[_ResponsesTool] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    previous_response_id: str | None = None


class _Block(BaseModel):
    type: Literal["text", "tool_use", "tool_result"]
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, JsonValue] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: str | list[_Part] | None = None


class _AnthropicMessage(BaseModel):
    role: Literal["user", "assistant"]
    content: str | list[_Block]


class _AnthropicTool(BaseModel):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, JsonValue]
    type: Literal["custom"] | None = None


class _MessagesBody(_Body):
    messages: list[_AnthropicMessage] = Field(min_length=1)
    system: _Content = None
    tools: list[_AnthropicTool] | None = None
    stop_sequences: list[str] | None = None
    max_tokens: int = Field(ge=1)


class Format(ABC):
    """One protocol, for one request."""

    body: type[_Body]
    kind: str
    """Prefix of the ids of answers."""

    def __init__(self, given: _Body, codec: Codec) -> None:
        self.given: Any = given
        self.codec = codec
        self.id = f"{self.kind}-{uuid4().hex[:24]}"
        self.created = int(time())
        self.sampling: TurnSampling | None = None
        """Sampling that the request asks for; None for the session's own."""

    @property
    def streams(self) -> bool:
        """True if the client wants server-sent events."""
        return bool(self.given.stream)

    @abstractmethod
    def asked(self, former: Mapping[str, Sequence[Message]]) -> Asked:
        """Return the request; `former` has the messages of earlier answers of the episode by id. Raises Refused."""

    @abstractmethod
    def written(self, reply: Reply) -> dict[str, Any]:
        """Return the whole answer."""

    @abstractmethod
    def begun(self) -> Iterator[str]:
        """Yield the events before the first text."""

    @abstractmethod
    def more(self, text: str) -> Iterator[str]:
        """Yield the events of further text."""

    @abstractmethod
    def ended(self, reply: Reply, rest: str) -> Iterator[str]:
        """Yield the last events; `rest` is text of which there was no event."""

    @staticmethod
    def error(refusal: Refused) -> dict[str, Any]:
        """Return an error as this protocol writes it."""
        kind = "invalid_request_error" if refusal.status < 500 else "server_error"
        return {"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code}}


class ChatCompletions(Format):
    """POST /v1/chat/completions."""

    body = _ChatBody
    kind = "chatcmpl"

    def asked(self, former: Mapping[str, Sequence[Message]]) -> Asked:  # noqa: ARG002
        given = self.given
        messages = [_message(one, f"messages.{at}") for at, one in enumerate(given.messages)]
        tools = [_tool(one.function) for one in given.tools or ()]
        limits = [limit for limit in (given.max_tokens, given.max_completion_tokens) if limit is not None]
        return Asked(messages, tools, _stops(given.stop), min(limits, default=None))

    def written(self, reply: Reply) -> dict[str, Any]:
        choice = {"index": 0, "message": self._message(reply), "finish_reason": reply.finish}
        return self._object("chat.completion") | {
            "choices": [choice | {"logprobs": self._logprobs(reply)}],
            "usage": _usage(reply),
        }

    def begun(self) -> Iterator[str]:
        yield self._chunk({"role": "assistant", "content": ""})

    def more(self, text: str) -> Iterator[str]:
        yield self._chunk({"content": text})

    def ended(self, reply: Reply, rest: str) -> Iterator[str]:
        if rest:
            yield self._chunk({"content": rest})
        for at, call in enumerate(reply.message.get("tool_calls", ())):
            yield self._chunk({"tool_calls": [{"index": at, **_written_call(call)}]})
        yield self._chunk({}, reply.finish, self._logprobs(reply))
        options = (self.given.model_extra or {}).get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            yield _event(self._object("chat.completion.chunk") | {"choices": [], "usage": _usage(reply)})
        yield "data: [DONE]\n\n"

    def _object(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": MODEL}

    def _message(self, reply: Reply) -> dict[str, Any]:
        calls = [_written_call(call) for call in reply.message.get("tool_calls", ())]
        content = reply.message["content"] or (None if calls else "")
        return {"role": "assistant", "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return _event(self._object("chat.completion.chunk") | {"choices": [choice]})

    def _logprobs(self, reply: Reply) -> dict[str, Any] | None:
        if not self.given.logprobs:
            return None
        pairs = zip(reply.token_ids, reply.logprobs, strict=True)
        return {"content": [_token(self.codec, *pair) for pair in pairs], "refusal": None}


class Completions(Format):
    """POST /v1/completions."""

    body = _TextBody
    kind = "cmpl"

    def asked(self, former: Mapping[str, Sequence[Message]]) -> Asked:  # noqa: ARG002
        return Asked((), (), _stops(self.given.stop), self.given.max_tokens, encodable(self.given.prompt))

    def written(self, reply: Reply) -> dict[str, Any]:
        return self._object(reply.message["content"], reply.finish, self._logprobs(reply)) | {"usage": _usage(reply)}

    def begun(self) -> Iterator[str]:
        yield from ()

    def more(self, text: str) -> Iterator[str]:
        yield _event(self._object(text))

    def ended(self, reply: Reply, rest: str) -> Iterator[str]:
        yield _event(self._object(rest, reply.finish, self._logprobs(reply)))
        yield "data: [DONE]\n\n"

    def _object(self, text: str, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": logprobs}
        about = {"id": self.id, "object": "text_completion", "created": self.created, "model": MODEL}
        return about | {"choices": [choice]}

    def _logprobs(self, reply: Reply) -> dict[str, Any] | None:
        if self.given.logprobs is None:
            return None
        tokens = [self.codec.decode_all([token]) for token in reply.token_ids]
        return {"tokens": tokens, "token_logprobs": list(reply.logprobs), "top_logprobs": None, "text_offset": None}


class _Instructions(dict[str, Any]):
    """Message of the instructions of a request; a request that continues its answer does not inherit it."""


class Responses(Format):
    """POST /v1/responses."""

    body = _ResponsesBody
    kind = "resp"

    def __init__(self, given: _Body, codec: Codec) -> None:
        super().__init__(given, codec)
        self._number = 0
        self._item = f"msg-{uuid4().hex[:24]}"
        self._text_begun = False
        self._text = ""

    def asked(self, former: Mapping[str, Sequence[Message]]) -> Asked:
        given = self.given
        items = given.input if isinstance(given.input, list) else [_Item(role="user", content=given.input)]
        before = given.previous_response_id
        if before is not None and before not in former:
            raise Refused(
                f"No answer of this episode has the id {before:.80}.", code="unknown", param="previous_response_id"
            )
        earlier = former[before] if before is not None else ()
        messages = [*(one for one in earlier if not isinstance(one, _Instructions)), *_of_items(items)]
        if given.instructions is not None:
            messages.insert(0, _Instructions(_said("system", given.instructions)))
        if not messages:
            raise Refused("input has no message: give at least one.", code="missing", param="input")
        return Asked(messages, [_tool(one) for one in given.tools or ()], (), given.max_output_tokens)

    def written(self, reply: Reply) -> dict[str, Any]:
        cut = reply.finish == "length"
        usage = _usage(reply)
        return self._object("incomplete" if cut else "completed") | {
            "output": list(self._output(reply)),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def begun(self) -> Iterator[str]:
        yield self._event("response.created", response=self._object("in_progress"))
        yield self._event("response.in_progress", response=self._object("in_progress"))

    def more(self, text: str) -> Iterator[str]:
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        if not self._text_begun:
            self._text_begun = True
            item = self._message("", "in_progress") | {"content": []}
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._event("response.content_part.added", **place, part=_output_text(""))
        self._text += text
        yield self._event("response.output_text.delta", **place, delta=text, logprobs=[])

    def ended(self, reply: Reply, rest: str) -> Iterator[str]:
        if rest or not (self._text_begun or reply.message.get("tool_calls")):
            yield from self.more(rest)
        if self._text_begun:
            place = {"item_id": self._item, "output_index": 0, "content_index": 0}
            yield self._event("response.output_text.done", **place, text=self._text, logprobs=[])
            yield self._event("response.content_part.done", **place, part=_output_text(self._text))
            yield self._event("response.output_item.done", output_index=0, item=self._message(self._text, "completed"))
        output = list(self._output(reply))
        for at, item in enumerate(output):
            if item["type"] == "function_call":
                place = {"item_id": item["id"], "output_index": at}
                begun = item | {"arguments": "", "status": "in_progress"}
                yield self._event("response.output_item.added", output_index=at, item=begun)
                yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
                yield self._event(
                    "response.function_call_arguments.done", **place, arguments=item["arguments"], name=item["name"]
                )
                yield self._event("response.output_item.done", output_index=at, item=item)
        kind = "incomplete" if reply.finish == "length" else "completed"
        yield self._event(f"response.{kind}", response=self.written(reply))

    def _event(self, kind: str, **values: Any) -> str:
        self._number += 1
        return f"event: {kind}\n{_event({'type': kind, 'sequence_number': self._number - 1, **values})}"

    def _object(self, status: str) -> dict[str, Any]:
        given = self.given
        about = {"id": self.id, "object": "response", "created_at": self.created, "model": MODEL, "status": status}
        nothing = dict.fromkeys(("error", "incomplete_details", "usage", "temperature", "top_p"))
        asked = {"instructions": given.instructions, "max_output_tokens": given.max_output_tokens, "metadata": {}}
        asked |= {"previous_response_id": given.previous_response_id, "parallel_tool_calls": True}
        tools = [one.model_dump() | {"strict": None} for one in given.tools or ()]
        return {**nothing, **asked, "output": [], "tools": tools, "tool_choice": "auto", **about}

    def _output(self, reply: Reply) -> Iterator[dict[str, Any]]:
        calls = reply.message.get("tool_calls", ())
        if reply.message["content"] or not calls:
            yield self._message(reply.message["content"], "incomplete" if reply.finish == "length" else "completed")
        for call in calls:
            function = _written_call(call)["function"]
            yield {"type": "function_call", "id": f"fc-{call['id']}", "call_id": call["id"], **function} | {
                "status": "completed"
            }

    def _message(self, text: str, status: str) -> dict[str, Any]:
        content = [_output_text(text)]
        return {"type": "message", "id": self._item, "role": "assistant", "status": status, "content": content}


class Messages(Format):
    """POST /v1/messages."""

    body = _MessagesBody
    kind = "msg"

    def __init__(self, given: _Body, codec: Codec) -> None:
        super().__init__(given, codec)
        self._text_begun = False

    def asked(self, former: Mapping[str, Sequence[Message]]) -> Asked:  # noqa: ARG002
        given = self.given
        messages = [_said("system", given.system)] if given.system else []
        for message in given.messages:
            messages += _of_blocks(message)
        tools = [
            _tool(_Function(name=one.name, description=one.description, parameters=one.input_schema))
            for one in given.tools or ()
        ]
        return Asked(messages, tools, _stops(given.stop_sequences), given.max_tokens)

    def written(self, reply: Reply) -> dict[str, Any]:
        content = [{"type": "text", "text": reply.message["content"]}] if reply.message["content"] else []
        content += [_tool_use(call) for call in reply.message.get("tool_calls", ())]
        return self._object() | {"content": content, **self._stop(reply), "usage": self._usage(reply)}

    def begun(self) -> Iterator[str]:
        usage = {"input_tokens": 0, "output_tokens": 0}
        yield self._event("message_start", message=self._object() | {"content": [], "usage": usage})

    def more(self, text: str) -> Iterator[str]:
        if not self._text_begun:
            self._text_begun = True
            yield self._event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield self._event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def ended(self, reply: Reply, rest: str) -> Iterator[str]:
        if rest:
            yield from self.more(rest)
        if self._text_begun:
            yield self._event("content_block_stop", index=0)
        for at, call in enumerate(reply.message.get("tool_calls", ()), int(self._text_begun)):
            use = _tool_use(call)
            given = {"type": "input_json_delta", "partial_json": json.dumps(use["input"])}
            yield self._event("content_block_start", index=at, content_block=use | {"input": {}})
            yield self._event("content_block_delta", index=at, delta=given)
            yield self._event("content_block_stop", index=at)
        yield self._event("message_delta", delta=self._stop(reply), usage=self._usage(reply))
        yield self._event("message_stop")

    @staticmethod
    def error(refusal: Refused) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
        kind = kinds.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(refusal)}}

    def _object(self) -> dict[str, Any]:
        about = {"id": self.id, "type": "message", "role": "assistant", "model": MODEL}
        return {**about, "stop_reason": None, "stop_sequence": None}

    def _event(self, kind: str, **values: Any) -> str:
        return f"event: {kind}\n{_event({'type': kind, **values})}"

    def _stop(self, reply: Reply) -> dict[str, Any]:
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        reason = "stop_sequence" if reply.stop is not None and reply.finish == "stop" else reasons[reply.finish]
        return {"stop_reason": reason, "stop_sequence": reply.stop if reason == "stop_sequence" else None}

    def _usage(self, reply: Reply) -> dict[str, Any]:
        fresh = reply.prompt_tokens - reply.cached_tokens
        cached = {"cache_read_input_tokens": reply.cached_tokens, "cache_creation_input_tokens": 0}
        return {"input_tokens": fresh, "output_tokens": len(reply.token_ids), **cached}


FORMATS: Mapping[str, type[Format]] = {
    "/v1/chat/completions": ChatCompletions,
    "/v1/completions": Completions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
}
"""Path -> protocol."""


def parsed(kind: type[Format], body: bytes, codec: Codec, sampling: TurnSampling, rule: SamplingRule) -> Format:
    """Return the request in `body`. Raises Refused with the field that is wrong or asks what cannot be given."""
    try:
        values = json.loads(body)
        require_shallow(values)
        given = kind.body.model_validate(values)
        wanted = _Sampling.model_validate(values) if rule is SamplingRule.asked else _Sampling()
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "The body"
        raise Refused(f"{where:.200}: {first['msg']:.200}.", param=where[:200]) from error
    except (ValueError, RecursionError) as error:
        raise Refused("The body is not plain JSON in UTF-8: send a JSON object.", code="malformed") from error
    if (count := (given.model_extra or {}).get("n")) not in (None, 1):
        raise Refused(
            f"n={count!r:.80}: a request has one answer; send several requests.", code="unsupported_value", param="n"
        )
    if rule is not SamplingRule.ignored:
        require_settled(given, sampling, applied=set(_Sampling.model_fields) if rule is SamplingRule.asked else set())
    asked = kind(given, codec)
    asked.sampling = replace(sampling, **wanted.model_dump(exclude_none=True))
    return asked


def require_settled(given: _Body, sampling: TurnSampling, applied: set[str]) -> None:
    """Raise Refused for the first field that asks for other sampling than the session's, or that nothing here reads.

    The fields `applied` may ask for anything.
    """
    own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k, "model": MODEL}
    fix = "leave it out" if applied else "leave it out, or set task.agent.ignore_sampling=true"
    for name, value in {"model": given.model, **(given.model_extra or {})}.items():
        if value is None or name in _HARMLESS or name in applied or value in _NEUTRAL.get(name, ()):
            continue
        if name not in own:
            why = "" if applied else ", because training needs answers as the run samples them"
            raise Refused(
                f"{name:.200}={value!r:.80} is not supported{why}: {fix}.",
                code="unsupported_parameter",
                param=name[:200],
            )
        if value != own[name] and (name, value, own[name]) != ("top_k", 0, -1):
            why = "" if applied else ", with which every token must be sampled"
            raise Refused(
                f"{name}={value!r:.80} differs from {own[name]!r}{why}: {fix}.", code="unsupported_value", param=name
            )


def _message(given: _ChatMessage, where: str) -> Message:
    role = "system" if given.role == "developer" else given.role
    message = dict(_said(role, given.content))
    if given.tool_calls:
        if role != "assistant":
            raise Refused(f"{where}.tool_calls: only an assistant calls tools.", param=where)
        message["tool_calls"] = [
            _call(one.id, one.function.name, one.function.arguments, where) for one in given.tool_calls
        ]
    if role == "tool":
        message["tool_call_id"] = given.tool_call_id or ""
    return message


def _of_items(items: Sequence[_Item]) -> list[Message]:
    """Return the messages of items of the Responses API. Calls belong to the message of the assistant before them."""
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        where = f"input.{at}"
        if item.type == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_call(item.call_id, item.name, item.arguments, where))
        elif item.type == "function_call_output":
            messages.append({**_said("tool", item.output), "tool_call_id": item.call_id})
        elif item.role is None:
            raise Refused(f"{where}.role is missing.", code="missing", param=where)
        else:
            messages.append(dict(_said("system" if item.role == "developer" else item.role, item.content)))
    return list(messages)


def _of_blocks(given: _AnthropicMessage) -> list[Message]:
    """Return the messages of one of Anthropic's: results of tools come before the text of a user."""
    if isinstance(given.content, str):
        return [_said(given.role, given.content)]
    text = "".join(block.text for block in given.content if block.type == "text")
    results: list[Message] = [
        {**_said("tool", block.content), "tool_call_id": block.tool_use_id}
        for block in given.content
        if block.type == "tool_result"
    ]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": encodable_json(block.input)}}
        for block in given.content
        if block.type == "tool_use"
    ]
    if given.role == "assistant":
        return [{**_said("assistant", text), **({"tool_calls": calls} if calls else {})}]
    return [*results, *([_said("user", text)] if text or not results else [])]


def _said(role: str, content: _Content) -> Message:
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    return {"role": role, "content": encodable(text)}


def _call(identity: str, name: str, arguments: str, where: str) -> dict[str, Any]:
    try:
        given = json.loads(arguments or "{}")
        require_shallow(given)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise Refused(f"{where}: the arguments of {name:.80} are not a JSON object.", code="malformed", param=where)
    return {
        "id": identity,
        "type": "function",
        "function": {"name": encodable(name), "arguments": encodable_json(given)},
    }


def _tool(given: _Function) -> dict[str, Any]:
    parameters = given.parameters or {"type": "object", "properties": {}}
    about = {"name": given.name, "description": given.description or "", "parameters": parameters}
    return {"type": "function", "function": encodable_json(about)}


def _stops(given: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = tuple(filter(None, [given] if isinstance(given, str) else given or ()))
    if len(stops) > MOST_STOPS or any(len(stop) > 256 for stop in stops):
        raise Refused(f"stop has more than {MOST_STOPS} texts, or one of more than 256 characters.", param="stop")
    return tuple(map(encodable, stops))


def _written_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(reply: Reply) -> dict[str, Any]:
    prompt, made = reply.prompt_tokens, len(reply.token_ids)
    cached = {"prompt_tokens_details": {"cached_tokens": reply.cached_tokens}}
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made, **cached}


def _token(codec: Codec, token: int, logprob: float) -> dict[str, Any]:
    text = codec.decode_all([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


def _event(values: Mapping[str, Any]) -> str:
    """Format a server-sent event. The JSON is ASCII, so no text can end its line."""
    return f"data: {json.dumps(values)}\n\n"
