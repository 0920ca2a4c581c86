"""A host of an MCP server: the policy calls the server's tools as functions, through OpenAI's SDK.

The server is at MCP_URL, such as `rlsys search serve INDEX --pages PAGES --mcp`. The policy needs a chat template with
tools, such as Qwen's:

PYTHONPATH=$PWD MCP_URL=http://127.0.0.1:8000/mcp rlsys train -c searchr1_qwen2.5_3b_1node task.agent=gateway \\
    task.agent.entry=examples.agents.mcp_host.agent task.token_mode=append task.train_eos=false
"""

import json
import os
from typing import Any

from mcp import Client, MCPError
from openai import AsyncOpenAI

MOST_MESSAGES = 8
MOST_CHARS = 4000


async def agent(question: str, base_url: str, api_key: str) -> str:
    """Pass the policy's calls to the server until a message has none; return that message."""
    messages: list[Any] = [{"role": "user", "content": question}]
    said = ""
    async with (
        Client(os.environ["MCP_URL"]) as server,
        AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as policy,
    ):
        tools: list[Any] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
            }
            for tool in (await server.list_tools()).tools
        ]
        for _ in range(MOST_MESSAGES):
            reply = await policy.chat.completions.create(model="policy", messages=messages, tools=tools)
            message = reply.choices[0].message
            said = message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                content = await result(server, call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content[:MOST_CHARS]})
    return said


async def result(server: Client, name: str, arguments: str) -> str:
    """Return the text of a tool's result, or why there is none."""
    try:
        found = await server.call_tool(name, json.loads(arguments))
    except (ValueError, MCPError) as error:
        return f"The call failed: {error}"
    return "\n".join(block.text for block in found.content if block.type == "text")
