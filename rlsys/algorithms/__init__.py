"""Advantages, losses, KL estimators and corrections for off-policy tokens, as pure functions of tensors and arrays.

Process: the driver (advantages, corrections, KL in the reward) and the Megatron processes (losses, KL in the loss).
May import: config.
"""
