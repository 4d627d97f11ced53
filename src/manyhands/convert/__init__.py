"""What makes a model trainable the way the plan names: adapters, quantization, kernels, fused loss."""
