"""Chat templates in the form of the public ones, with their tokenizers and the text that they write, and tools to call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.rollout.agent.tokens import Codec
from tests.support.bpe import build_tokenizer

Message = Mapping[str, Any]
CHATML = """\
{%- if tools %}
    {{- "<|im_start|>system\\n" + messages[0].content + "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" + (tool | tojson) }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == "system" %}
    {{- "<|im_start|>system\\n" + messages[0].content + "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "<|im_start|>user\\n" + message.content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" %}
        {{- "<|im_start|>assistant\\n" + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- "\\n" }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + "}\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- elif message.role == "tool" %}
        {%- if messages[loop.index0 - 1].role != "tool" %}{{- "<|im_start|>user" }}{%- endif %}
        {{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- "<|im_end|>\\n" }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}"""
THINKING = (
    "{%- set ns = namespace(last=-1) %}{%- for message in messages %}"
    '{%- if message.role == "user" %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}'
) + CHATML.replace(
    '{{- "<|im_start|>assistant\\n" + message.content }}',
    """{%- set said = message.content %}
        {%- if "</think>" in said and loop.index0 < ns.last %}{%- set said = said.split("</think>")[-1] %}{%- endif %}
        {{- "<|im_start|>assistant\\n" + said }}""",
).replace("message.content or not loop.first", "said or not loop.first")
LLAMA = """\
{{- "<|begin_of_text|>" }}
{%- if tools %}{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + (tools | tojson) + "<|eot_id|>" }}{%- endif %}
{%- for message in messages %}
    {{- "<|start_header_id|>" + ("ipython" if message.role == "tool" else message.role) + "<|end_header_id|>\\n\\n" }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' + (call.function.arguments | tojson) + "}" }}
        {%- endfor %}
    {%- else %}{{- message.content | trim }}{%- endif %}
    {{- "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{%- endif %}"""
MISTRAL = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == "user" %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{{- "<s>" }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools and loop.index0 == ns.last %}
            {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " }}
        {%- if messages[0].role == "system" and loop.index0 == ns.last %}{{- messages[0].content + "\\n\\n" }}{%- endif %}
        {{- message.content + "[/INST]" }}
    {%- elif message.role == "assistant" and message.tool_calls %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception("Tool call IDs should be strings of length 9!") }}{%- endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + "}" }}
        {%- endfor %}
        {{- "]</s>" }}
    {%- elif message.role == "assistant" %}
        {{- " " + (message.content | trim) + "</s>" }}
    {%- elif message.role == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + "}[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}"""


@dataclass(frozen=True)
class Template:
    """A chat template beside what is known of it without rendering it."""

    name: str
    codec: Codec
    end: str
    """Special token that ends an answer."""
    closing: str
    """Text after an answer."""
    written: Callable[[Sequence[Message]], str]
    """Text of new messages and the start of an answer, after `closing`."""
    changes: Callable[[Sequence[Message], Sequence[Message], bool], bool]
    """Whether the text of the former messages changes by new ones; the last argument is true with tools."""


def _codec(template: str, end: str, special: Sequence[str]) -> Codec:
    tokenizer = build_tokenizer(words=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *special]})
    tokenizer.chat_template, tokenizer.eos_token = template, end
    return Codec(tokenizer)


def _calls(message: Message, form: str) -> list[str]:
    dumps = json.dumps
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [form % (one["name"], dumps(one["arguments"], ensure_ascii=False)) for one in functions]


def _chatml(messages: Sequence[Message]) -> str:
    text, open_results = "", False
    for message in messages:
        if open_results and message["role"] != "tool":
            text, open_results = text + "<|im_end|>\n", False
        if message["role"] == "tool":
            text += "" if open_results else "<|im_start|>user"
            text, open_results = text + f"\n<tool_response>\n{message['content']}\n</tool_response>", True
        else:
            calls = _calls(message, '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>')
            said = "\n".join([*filter(None, [message["content"]]), *calls])
            text += f"<|im_start|>{message['role']}\n{said}<|im_end|>\n"
    return text + ("<|im_end|>\n" if open_results else "") + "<|im_start|>assistant\n"


def _thinking(messages: Sequence[Message]) -> str:
    last = max((at for at, one in enumerate(messages) if one["role"] == "user"), default=-1)
    return _chatml(
        [
            {**one, "content": one["content"].split("</think>")[-1]}
            if one["role"] == "assistant" and at < last
            else one
            for at, one in enumerate(messages)
        ]
    )


def _llama(messages: Sequence[Message]) -> str:
    roles = {"tool": "ipython"}
    bodies = ["".join(_calls(one, '{"name": "%s", "parameters": %s}')) or one["content"].strip() for one in messages]
    parts = [
        f"<|start_header_id|>{roles.get(one['role'], one['role'])}<|end_header_id|>\n\n{body}<|eot_id|>"
        for one, body in zip(messages, bodies, strict=True)
    ]
    return "".join(parts) + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def _mistral(messages: Sequence[Message]) -> str:
    text = ""
    for one in messages:
        calls, said = _calls(one, '{"name": "%s", "arguments": %s}'), one["content"]
        if calls:
            text += f"[TOOL_CALLS] [{''.join(calls)}]</s>"
        elif one["role"] == "assistant":
            text += f" {said.strip()}</s>"
        elif one["role"] == "tool":
            text += '[TOOL_RESULTS] {"content": ' + json.dumps(said, ensure_ascii=False) + "}[/TOOL_RESULTS]"
        elif one["role"] == "user":
            text += f"[INST] {said}[/INST]"
    return text


def _asks(new: Sequence[Message]) -> bool:
    return any(message["role"] == "user" for message in new)


def _strips(former: Sequence[Message], new: Sequence[Message], _: bool) -> bool:
    last = max((at for at, one in enumerate(former) if one["role"] == "user"), default=-1)
    return _asks(new) and any("</think>" in one["content"] for one in former[last + 1 :] if one["role"] == "assistant")


def _drops_content(former: Sequence[Message], *_: object) -> bool:
    return bool(former[-1].get("tool_calls")) and bool(former[-1]["content"].strip())


def _moves(former: Sequence[Message], new: Sequence[Message], tools: bool) -> bool:
    return _drops_content(former) or (_asks(new) and (tools or former[0]["role"] == "system"))


_LLAMA_SPECIAL = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_MISTRAL_SPECIAL = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
_MISTRAL_SPECIAL += ["[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
END = "<|im_end|>"
TEMPLATES = [
    Template("chatml", _codec(CHATML, END, []), END, f"{END}\n", _chatml, lambda *_: False),
    Template("thinking", _codec(THINKING, END, []), END, f"{END}\n", _thinking, _strips),
    Template("llama", _codec(LLAMA, "<|eot_id|>", _LLAMA_SPECIAL), "<|eot_id|>", "<|eot_id|>", _llama, _drops_content),
    Template("mistral", _codec(MISTRAL, "</s>", _MISTRAL_SPECIAL), "</s>", "</s>", _mistral, _moves),
]


def _function(name: str, argument: str, about: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


FUNCTIONS = [
    _function("search", "query", "search for passages about a query"),
    _function("calculator", "text", "evaluate arithmetic with + - * / // % ** and parentheses"),
]


def called(name: str, arguments: Any) -> str:
    """Write a call as Qwen's templates do."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
