"""CPU backend: convolution algorithms made of PyTorch operators."""
