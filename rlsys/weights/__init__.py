"""The map between Hugging Face and Megatron weights, and all that moves them: buckets, transports, checkpoints, conversion.

`weight_map` is the map, `family/` has the model families as data, `transport` the ways from the actor to the engines,
`checkpoint/` what a run saves and the formats that are read, `convert/` conversion both ways.

Process: Megatron processes, engines, and the commands that convert. May import: config, errors, files.
"""
