"""Execution: convolutions run by a plan, eagerly, in autograd, in place of aten's own."""
