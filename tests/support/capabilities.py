"""Capabilities of a machine with the gpu profile installed."""

from rlsys.observe.environment import Capabilities

H100 = Capabilities(
    cuda_devices=8,
    compute_capability=(9, 0),
    nccl=True,
    torch="2.13.0",
    cuda="13.0",
    transformer_engine="2.20.2",
    flash_attn_4="4.0.0b36",
    apex=True,
    sglang_kernel="0.4.7",
    torch_memory_saver="0.0.10",
)
