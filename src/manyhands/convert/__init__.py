"""What changes a model before it is trained, one converter a feature: adapters, quantization, fp8, fused kernels."""
