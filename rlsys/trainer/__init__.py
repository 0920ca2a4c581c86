"""The Megatron processes: model, actor, critic, log-probs, reference policy, optimiser, micro-batches.

Process: one per rank of the actor, the critic and the inference group. May import: observe, weights, data, algorithms,
config, errors.
"""
