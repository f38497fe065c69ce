"""From a profile to a plan: pure functions over plain records. No torch, no Megatron, no GPU."""
