"""CPUs and GPUs: moving pixels there and back, memory limits, what decides their last bits."""
