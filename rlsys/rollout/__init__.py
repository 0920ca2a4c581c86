"""The rollout process: an engine, the agent's episodes and the tools that they call.

`agent/` has the episodes, `tools/` the tools. Only this package imports sglang.

Process: one per engine. May import: search, weights, data, config, components, errors.
"""
