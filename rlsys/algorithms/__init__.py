"""Advantages, policy losses, KL estimators and corrections for off-policy tokens, as pure functions of tensors and arrays.

Process: the driver (advantages, KL in the reward) and the Megatron processes (losses). May import: config.
"""
