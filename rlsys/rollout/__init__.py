"""Rollouts: SGLang engines that drive episodes. Nothing outside this package imports sglang."""
