"""Linear layers whose matmuls are in fp8."""
