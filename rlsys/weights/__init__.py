"""Maps weights between Hugging Face and Megatron, and moves them: transport in buckets, checkpoints, conversion.

- `weight_map`: the tensor map; `family_file`: reads model families, `family/` has the built-in ones; `flops`: the
  operations of a model.
- `transport`: sends weights in buckets from the actor to engines and the inference group.
- `checkpoint/`: checkpoints of a run, and readers and writers of Megatron's formats.
- `convert/`: conversion in both directions; `hf_io`: safetensors files.

Process: Megatron processes, engines, and the conversion commands. May import: config, errors, files.
"""
