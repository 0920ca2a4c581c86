"""Advantages, losses, KL estimators, corrections for off-policy tokens and optimisers: pure code on tensors and arrays.

Process: the driver (advantages, corrections, KL in the reward, the trial of an optimiser) and the Megatron processes
(losses, KL in the loss, optimisers). May import: config, errors.
"""
