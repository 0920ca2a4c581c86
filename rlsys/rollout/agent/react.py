"""ReAct by the model's own chat template: tool calls as JSON, results as messages of the role tool.

The policy writes any number of <tool_call>{"name": ..., "arguments": {...}}</tool_call> in a message, and reads all
results in the next one. A message without a call is the answer. Between two messages stands exactly what the template
writes there; its tokens are not sampled, and the sampled ones are never altered.

A malformed call, an unknown tool and wrong arguments get an error as their result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlsys.components import one_line
from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish
from rlsys.errors import UserError
from rlsys.files import require_shallow
from rlsys.rollout.agent.chat_recorder import TOOL_CALL, tagged
from rlsys.rollout.agent.observation import Observer
from rlsys.rollout.agent.recorder import FurtherCall, Generation, Parsed, Recorder
from rlsys.rollout.agent.tokens import Codec, encodable
from rlsys.rollout.tools.calls import SEARCH, Toolbox, ToolResult, render_result
from rlsys.rollout.tools.interface import Tool, parameters_of, shape_of

_RESULT = "rlsys_result_{}_"
"""Text in place of a result, to find what the template writes around it."""


async def react(question: Question, tools: Toolbox, recorder: Recorder, *, system: str) -> Finish:
    """Play an episode: generate, call, observe, until a message has no call."""
    chat, task = ChatFormat(recorder.codec, tools.by_name, searches=tools.searches), recorder.task
    recorder.begin(chat.prompt(system, question.text or question.prompt))

    def parse(text: str, generation: Generation) -> Parsed:
        if generation.finish == "length":
            return Parsed(text, Action.INVALID, "")
        calls = chat.calls(text)
        return calls[0].parsed(text) if calls else Parsed(text, Action.ANSWER, tagged(text, task.tags.answer))

    while True:
        number = recorder.generations
        turn = await recorder.generate(parse)
        if turn.action is Action.ANSWER:
            return Finish.ANSWER
        if recorder.cut_off:
            return Finish.TOKEN_LIMIT
        if number >= task.max_turns:
            return Finish.TURN_LIMIT
        calls = chat.calls(turn.text)
        limit = min(task.max_observation_tokens, recorder.room)
        if chat.tokens(len(calls)) > limit:
            return Finish.TOKEN_LIMIT
        results = [await _result(call, tools) for call in calls]
        bodies = [call.error or render_result(each, call.tool) for call, each in zip(calls, results, strict=True)]
        first, *others = chat.observations(bodies, recorder.ended_by, limit)
        made = [call.parsed("") for call in calls]
        recorder.observe(first, results[0], list(map(FurtherCall, made[1:], others, results[1:])))


async def _result(call: Call, tools: Toolbox) -> ToolResult:
    return ToolResult("", call.error) if call.error else await tools.call(call.tool, call.content)


class Call(NamedTuple):
    tool: str = ""
    """Name of the tool; empty for the search."""
    content: str = ""
    error: str = ""
    """Reason that nothing can be called; empty if it can."""

    def parsed(self, text: str) -> Parsed:
        """Return the turn with `text` that makes this call."""
        if self.error:
            return Parsed(text, Action.INVALID, "")
        return Parsed(text, Action.TOOL if self.tool else Action.SEARCH, self.content, self.tool)


class ChatFormat:
    """Reads calls and writes prompts and results by the chat template of a tokenizer.

    Raises UserError if the template describes no tools or does not write their results.
    """

    def __init__(self, codec: Codec, tools: Mapping[str, Tool], *, searches: bool) -> None:
        """`tools` are by name."""
        self._codec = codec
        self._functions = {
            name: _Function(name, tool.description, "" if (schema := parameters_of(tool)) else "text", schema or {})
            for name, tool in tools.items()
        }
        if searches:
            search = _Function("", "search for passages about a query", "query", {})
            self._functions = {SEARCH: search, **self._functions}
        self._results = Observer(codec, ("tool_call", "tool_response"))
        described = self.prompt("", "")
        if not all(name in described for name in self._functions):
            raise _no_template("it does not describe tools")

    def prompt(self, system: str, question: str) -> str:
        """Return the prompt, which describes the tools."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        functions = [each.schema(name) for name, each in self._functions.items()]
        return self._written(lambda: self._codec.chat(messages, functions))

    def calls(self, message: str) -> list[Call]:
        """Return the calls in a message, after its reasoning."""
        return [self._call(body) for body in TOOL_CALL.findall(message.rpartition("</think>")[2])]

    def tokens(self, results: int) -> int:
        """Return the number of tokens that the template writes around a number of results."""
        return len(self._codec.encode("".join(self._around(results))))

    def observations(self, bodies: Sequence[str], ended_by: str, limit: int) -> list[str]:
        """Return the results as observations, one per body, with at most `limit` tokens together.

        The first one continues a message that ended with the special token `ended_by`.
        """
        before, *after = self._around(len(bodies))
        share = (limit - self.tokens(len(bodies))) // len(bodies)
        while True:
            cut = [self._results.observe(body, share) for body in bodies]
            texts = [body + closing for body, closing in zip(cut, after, strict=True)]
            whole = [before.removeprefix(ended_by) + texts[0], *texts[1:]]
            if not share or len(self._codec.encode("".join(whole))) <= limit:
                return whole
            share -= 1

    def _call(self, body: str) -> Call:
        try:
            call = json.loads(body)
            require_shallow(call)
        except (ValueError, RecursionError) as error:
            return Call(error=f"The call is not JSON ({one_line(error)}).")
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in self._functions:
            known = ", ".join(self._functions)
            return Call(error=f"There is no tool {json.dumps(name, ensure_ascii=False):.80}: call one of {known}.")
        function, given = self._functions[name], call.get("arguments")
        text = function.content(given) if isinstance(given, dict) else ""
        if not text:
            return Call(error=f"The arguments of {name} must be {function.shape()}.")
        return Call(function.tool, encodable(text))

    def _around(self, results: int) -> list[str]:
        """Return what the template writes between a message and the next one, split where the `results` stand."""
        marks = [_RESULT.format(number) for number in range(results)]
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ""}]
        messages += [{"role": "tool", "content": mark} for mark in marks]
        parts = re.split("|".join(marks), self._written(lambda: self._codec.following(messages, said=1)))
        if len(parts) != results + 1:
            raise _no_template("it does not write the result of a tool")
        return parts

    def _written(self, write: Callable[[], str]) -> str:
        try:
            return write()
        except Exception as error:  # Raised by the template, which is code of the model's folder.
            raise _no_template(one_line(error)) from error


class _Function(NamedTuple):
    """A tool as the template describes it."""

    tool: str
    """Name of the tool; empty for the search."""
    description: str
    argument: str
    """Name of the only argument, a text; empty for a tool with `parameters`."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments of other tools."""

    def schema(self, name: str) -> Mapping[str, Any]:
        """Return the function for the chat template."""
        text = {"type": "object", "properties": {self.argument: {"type": "string"}}, "required": [self.argument]}
        parameters = text if self.argument else self.parameters
        function = {"name": name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def content(self, given: Mapping[str, Any]) -> str:
        """Return what the tool gets: its text, or the JSON text of its arguments; empty for arguments that do not fit."""
        if self.argument:
            text = given[self.argument] if list(given) == [self.argument] else ""
            return text.strip() if isinstance(text, str) else ""
        known, needed = self.parameters.get("properties") or {}, self.parameters.get("required") or ()
        fits = given.keys() >= {*needed} and (not known or given.keys() <= known.keys())
        return json.dumps(given, ensure_ascii=False) if fits else ""

    def shape(self) -> str:
        """Return the form of the arguments in words."""
        return f'{{"{self.argument}": "..."}}' if self.argument else shape_of(self.parameters)


def _no_template(reason: str) -> UserError:
    return UserError(
        f"task.agent.kind=react needs a model whose chat template has tools and their results, such as Qwen's ({reason}): "
        "choose such a model, or task.agent.kind=search_r1.",
        code="unsupported",
        key="task.agent.kind",
    )
