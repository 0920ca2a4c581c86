"""Converts the recorded config of an older run: keys that were renamed, or moved into a group of their own."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

_CLIPPED = ("ppo", "gspo", "cispo")
_MOVED = {
    *("baseline", "advantage_scale", "credit", "gamma", "gae_lambda", "clip_low", "clip_high", "dual_clip"),
    *("kl_topk_tokens", "kl_topk_tail", "kl_use_tail_sampling"),
}
"""Former keys of `algorithm` that are now keys of its groups."""
_RENAMED: Mapping[tuple[str, str], tuple[str, Mapping[Any, Any]]] = {
    ("reward", "own_timeout_s"): ("custom_timeout_s", {}),
    ("algorithm", "recompute_logprobs"): ("old_logprobs", {True: "recompute", False: "engine"}),
}
"""Group and former name of a key -> present name, and present value of each former value that changed."""
_AGENT = ("invalid_message", "allow_empty_query")
"""Former keys of `task` that are now keys of `task.agent`."""


def present(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded `config` with present names; other keys stay as they are."""
    tree = {
        group: dict(_renamed(group, key, value) for key, value in part.items()) if isinstance(part, Mapping) else part
        for group, part in config.items()
    }
    for group, moved in (("algorithm", _with_groups), ("task", _with_agent)):
        if isinstance(tree.get(group), Mapping):
            tree[group] = moved(tree[group])
    return tree


def _renamed(group: str, key: str, value: Any) -> tuple[str, Any]:
    """Return the present name and value of a key."""
    name, values = _RENAMED.get((group, key), (key, {}))
    return name, values.get(value, value) if isinstance(value, Hashable) else value


def _with_groups(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys of advantage, policy loss and KL estimator, which were keys of `algorithm`, into their groups."""
    left = dict(algorithm)
    if "baseline" in left:
        left["advantage"] = _advantage(left)
    if isinstance(loss := left.get("policy_loss"), str):
        keys = {"clip_low": _CLIPPED, "clip_high": _CLIPPED, "dual_clip": ("ppo",)}
        own = {key: left[key] for key, kinds in keys.items() if loss in kinds and key in left}
        left["policy_loss"] = {"kind": loss, **own}
    if isinstance(estimator := left.get("kl_estimator"), str):
        names = {
            "kl_topk_tokens": "topk_tokens",
            "kl_topk_tail": "topk_tail",
            "kl_use_tail_sampling": "use_tail_sampling",
        }
        own = {name: left[key] for key, name in names.items() if estimator.startswith("full_") and key in left}
        left["kl_estimator"] = {"kind": estimator, **own}
    return {key: value for key, value in left.items() if key not in _MOVED}


def _with_agent(task: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys of the agent into its group; a tool's dotted name alone is its kind."""
    moved = {key: task[key] for key in _AGENT if key in task}
    tree = {key: value for key, value in task.items() if key not in _AGENT}
    if moved and isinstance(agent := tree.get("agent", {}), Mapping):
        tree["agent"] = {**agent, **moved}
    if isinstance(tools := tree.get("tools"), list):
        tree["tools"] = [{"kind": tool} if isinstance(tool, str) else tool for tool in tools]
    return tree


def _advantage(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    gamma = {"gamma": algorithm["gamma"]} if "gamma" in algorithm else {}
    scale = algorithm.get("advantage_scale", "group")
    if algorithm["baseline"] == "critic":
        smoothing = {"gae_lambda": algorithm["gae_lambda"]} if "gae_lambda" in algorithm else {}
        return {"kind": "gae", **gamma, **smoothing, "whiten": scale == "whiten"}
    credit = {"credit": algorithm["credit"]} if "credit" in algorithm else {}
    return {"kind": "returns", "baseline": algorithm["baseline"], "scale": scale, **credit, **gamma}
